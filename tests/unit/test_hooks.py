"""Every hook that a family overrides is explained where zoo defines it."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from abc import ABC
from typing import Any

import pytest

from zoo.bridge.mapping.table import Bridge
from zoo.data.processors.processor import Processor
from zoo.registry import families, get_family

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
        found |= {name for name in vars(kind) if name in below - {*vars(ABC)} and not re.fullmatch("__.*__", name)}
    return found


def hooks_of(name: str) -> set[tuple[str, str]]:
    parts = ("config", "model", "step", "processor")
    found = {(part, hook) for part in parts for cls in classes(name, part) for hook in overridden(cls)}
    bridge = get_family(name).load("bridge")
    fields = [field for field in dataclasses.fields(Bridge) if getattr(bridge, field.name) != field.default]
    return found | {("bridge", field.name) for field in fields}


def explained(cls: type) -> set[str]:
    """Names in the body of a class that have a docstring, or a comment in the lines of their definition."""
    source = textwrap.dedent(inspect.getsource(cls))
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    names = set()
    for node, following in zip(body, [*body[1:], None], strict=True):
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            names |= {node.target.id} if text or any(" # " in line for line in lines) else set()
    return names


@pytest.mark.parametrize("name", FAMILIES)
def test_every_hook_of_a_family_is_explained_in_zoo(name: str) -> None:
    """In a class of zoo's own that the family's comes from, which docs/add-a-family.md leads to."""
    text = explained(Bridge)
    for part in ("config", "model", "step", "processor"):
        for kind in {base for cls in classes(name, part) for base in cls.__mro__}:
            if kind.__module__.startswith("zoo.") and not kind.__module__.startswith("zoo.models."):
                text |= explained(kind)
    assert not {hook for _, hook in hooks_of(name)} - text


def test_no_family_overrides_what_is_private() -> None:
    assert len(FAMILIES) >= 4
    assert not [key for name in FAMILIES for key in hooks_of(name) if key[1].startswith("_")]


def test_what_counts_as_overridden() -> None:
    def kind(name: str, bases: tuple[type, ...] = (), **names: Any) -> type:
        return type(name, bases, {"__module__": "zoo.some", **names})

    base = kind("Base", a=1, b=2, __annotations__={"c": int})
    middle = kind("Middle", (base,), b=3, d=4)
    assert overridden(kind("Own", (middle,), c=5, e=6)) == {"b", "c"}
