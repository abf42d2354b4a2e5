"""Shims are applied, left out and taken back as compat.py says, and every fault of megatron-core has a test and a row in the docs."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from support.megatron_faults import AVOIDED, shim

from zoo.parallel.megatron import compat
from zoo.parallel.megatron.replaced import replaced

REPO = Path(__file__).parents[4]


def test_every_fault_has_a_test_and_a_file_that_is_there() -> None:
    folder = Path(__file__).parent
    for file, names in ("test_shimmed_faults.py", [s.name for s in compat.SHIMS]), ("test_avoided_faults.py", AVOIDED):
        tested = re.findall(r"def test_(\w+)\(", (folder / file).read_text())
        assert {name.replace("-", "_") for name in names} <= set(tested), f"{file}: a test is missing"
    assert all((REPO / "zoo" / file).exists() for file in AVOIDED.values())
    known = Version(version("megatron-core")) <= Version(compat.LAST_BROKEN)
    assert known, "look which faults this version has, and say so or remove them"


def test_the_tables_of_the_documentation_hold_every_fault() -> None:
    page = (REPO / "docs/megatron-faults.md").read_text()
    for title, names in (("Fixed by a shim", [s.name for s in compat.SHIMS]), ("Avoided", list(AVOIDED))):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        named = re.findall(r"^\| ([\w-]+) \| \w", section, re.MULTILINE)
        assert named[1:] == names, f"docs/megatron-faults.md: {title}"


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves one shim, with another `apply`, as if none had been applied."""

    def leave(apply: Callable[[], AbstractContextManager[None]]) -> None:
        monkeypatch.setattr(compat, "SHIMS", (replace(shim("norms-one-by-one"), apply=apply),))
        monkeypatch.setattr(compat, "_applied", set())

    return leave


def test_a_shim_is_applied_once_a_process_and_taken_back(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(value=1)
    monkeypatch.setattr(compat, "version", lambda name: "0.19.99")
    only(lambda: replaced(owner, value=owner.value + 1))
    for _ in range(2):
        with compat.installed(), compat.installed():
            assert owner.value == 2, "once, whatever the version"
        assert owner.value == 1


def test_a_shim_that_does_not_take_is_warned_of(only: Any) -> None:
    only(lambda: replaced(SimpleNamespace(), another_shape=1))
    with pytest.warns(UserWarning, match="norms-one-by-one.*AttributeError.*another_shape"), compat.installed():
        pass
