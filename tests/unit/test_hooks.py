"""docs/add-a-family.md names every hook that a family overrides, and which families do."""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from zoo.bridge.mapping.table import Bridge
from zoo.data.processors.processor import Processor
from zoo.registry import families, get_family

PAGE = Path(__file__).parents[2] / "docs/add-a-family.md"
FAMILIES = sorted(name for name, family in families().items() if family.config.startswith("zoo.models."))


def classes(name: str, part: str) -> list[type]:
    """The family's class of a part; of a processor, which is made by a function, the class that this returns."""
    if part != "processor":
        return [get_family(name).load(part)]
    module = importlib.import_module(get_family(name).processor.partition(":")[0])
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Processor)]
    return [c for c in found if c is not Processor]


def overridden(cls: type) -> set[str]:
    """Names of a class, or of one of zoo's that it comes from, that another of zoo's below has too."""
    ours = [k for k in cls.__mro__ if k.__module__.startswith("zoo.")]
    found = set()
    for at, kind in enumerate(ours):
        below = set().union(*({*vars(k), *vars(k).get("__annotations__", {})} for k in ours[at + 1 :]))
        found |= {name for name in vars(kind) if name in below and not re.fullmatch("__.*__", name)}
    return found


def hooks_of(name: str) -> set[tuple[str, str]]:
    parts = ("config", "model", "step", "processor")
    found = {(part, hook) for part in parts for cls in classes(name, part) for hook in overridden(cls)}
    bridge = get_family(name).load("bridge")
    fields = [field for field in dataclasses.fields(Bridge) if getattr(bridge, field.name) != field.default]
    return found | {("bridge", field.name) for field in fields}


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], set[str]]:
    """Families that use each hook; the page has names for groups of them, and `except` for the others of a group."""
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| .+ \| ([\w, ]+) \|$", PAGE.read_text(), re.M)
    with_media = {name for name in FAMILIES if get_family(name).modalities != ("text",)}
    thinkers = {"qwen25_omni", "qwen3_omni"}
    grid = {"glm45v", "qwen25_vl", "qwen35_vl", "qwen3_vl", *thinkers}
    groups = {"all": set(FAMILIES), "media": with_media, "grid": grid, "thinkers": thinkers}
    users_of = {}
    for part, hook, users in rows:
        group, _, others = users.partition(" except ")
        named = groups.get(group) or set(group.split(", "))
        users_of[part, hook] = named - set(others.split(", "))
    return users_of


@pytest.mark.parametrize("name", FAMILIES)
def test_every_hook_of_a_family_is_explained(name: str, table: dict[tuple[str, str], set[str]]) -> None:
    assert {key for key, users in table.items() if name in users} == hooks_of(name)


def test_no_family_overrides_what_is_private() -> None:
    assert len(FAMILIES) >= 4
    assert not [key for name in FAMILIES for key in hooks_of(name) if key[1].startswith("_")]


def test_what_counts_as_overridden() -> None:
    def kind(name: str, bases: tuple[type, ...] = (), **names: Any) -> type:
        return type(name, bases, {"__module__": "zoo.some", **names})

    base = kind("Base", a=1, b=2, __annotations__={"c": int})
    middle = kind("Middle", (base,), b=3, d=4)
    assert overridden(kind("Own", (middle,), c=5, e=6)) == {"b", "c"}
