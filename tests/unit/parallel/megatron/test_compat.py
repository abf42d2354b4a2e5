"""Shims are applied, left out and taken back as compat.py says, and every fault that it and avoided.py name has a test and a row in the docs."""

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from support.megatron_faults import shim

from zoo.parallel.megatron import compat
from zoo.parallel.megatron.avoided import AVOIDED, Avoided

REPO = Path(__file__).parents[4]


def test_every_fault_has_a_test_and_a_file_that_is_there() -> None:
    here = Path(__file__).parent
    tests = {compat.Shim: here / "test_shimmed_faults.py", Avoided: here / "test_avoided_faults.py"}
    for fault in (*compat.SHIMS, *AVOIDED):
        test = f"def test_{fault.name.replace('-', '_')}("
        assert test in tests[type(fault)].read_text(), f"{fault.name}: its test is missing"
        known = Version(version("megatron-core")) <= Version(fault.last_broken)
        assert known, f"{fault.name}: look whether this version has it, and say so or remove it"
    for avoided in AVOIDED:
        files = re.findall(r"zoo/[\w/.]*\w", avoided.instead)
        assert files and all((REPO / file).exists() for file in files), avoided.instead


def test_the_tables_of_the_documentation_hold_every_fault() -> None:
    page = (REPO / "docs/megatron-faults.md").read_text()
    for title, faults in (("Fixed by a shim", compat.SHIMS), ("Avoided", AVOIDED)):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        named = re.findall(r"^\| ([\w-]+) \| \w", section, re.MULTILINE)
        assert named[1:] == [fault.name for fault in faults], f"docs/megatron-faults.md: {title}"


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leaves one shim, as if none had been applied."""

    def leave(name: str, **changes: Any) -> compat.Shim:
        one = replace(shim(name), **changes)
        monkeypatch.setattr(compat, "SHIMS", (one,))
        monkeypatch.setattr(compat, "_applied", set())
        return one

    return leave


def broken() -> None:
    raise AttributeError("it has another shape")


def test_a_shim_is_applied_once_a_process_whatever_the_version(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(compat, "version", lambda name: "0.19.99")
    only("norms-one-by-one", apply=lambda: calls.append("applied"))
    compat.install()
    compat.install()
    assert calls == ["applied"]


def test_a_shim_that_does_not_take_is_warned_of(only: Any) -> None:
    only("norms-one-by-one", apply=broken)
    with pytest.warns(UserWarning, match="norms-one-by-one.*it has another shape"):
        compat.install()


def test_what_a_block_has_replaced_is_back_after_it(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(value=1)
    only("norms-one-by-one", apply=lambda: compat._replace(owner, value=2))
    with compat.installed():
        assert owner.value == 2
    assert owner.value == 1
