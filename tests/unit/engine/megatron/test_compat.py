"""Shims are applied, kept, left out and refused as compat.py says, and every fault that it and avoided.py name has a test and a row in the docs."""

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from support.megatron_faults import shim

from zoo.engine.megatron import compat
from zoo.engine.megatron.avoided import AVOIDED, Avoided
from zoo.errors import UserError

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


ANOTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.19.99" if name == "megatron-core" else real(name)
from zoo.engine.megatron import compat, probes
print(sorted(probes.pickles_that_ran()), probes.moments_are_saved_whole())
compat.install()
print(sorted(probes.pickles_that_ran()), probes.moments_are_saved_whole())
print(sorted(compat._applied) == sorted(shim.name for shim in compat.SHIMS))
"""


def test_another_version_of_megatron_core_switches_no_shim_off() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANOTHER_VERSION], capture_output=True, text=True, cwd=REPO
    )
    assert done.stdout.splitlines() == ["['common state', 'index', 'object'] False", "[] True", "True"], (
        done.stderr
    )
    assert "Traceback" not in done.stderr  # torch logs what it meets in a trap


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leaves one shim, as if none had been applied."""

    def leave(name: str, **changes: Any) -> compat.Shim:
        one = replace(shim(name), **changes)
        monkeypatch.setattr(compat, "SHIMS", (one,))
        monkeypatch.setattr(compat, "_applied", set())
        return one

    return leave


def broken() -> bool:
    raise AttributeError("it has another shape")


def test_a_shim_stays_on_unless_a_probe_of_its_fault_says_that_it_is_gone(only: Any) -> None:
    calls: list[str] = []
    for gone, applied in ((None, 1), (lambda: False, 1), (broken, 1), (lambda: True, 0)):
        only("norms-one-by-one", apply=lambda: calls.append("applied"), gone=gone)
        calls.clear()
        compat.install()
        compat.install()  # once a process
        assert len(calls) == applied


def test_a_shim_that_does_not_take_ends_the_start_where_data_or_safety_hang_on_it(only: Any) -> None:
    for changes in ({"apply": broken}, {"works": broken}, {"works": lambda: False}):
        only("norms-one-by-one", **changes, risk="something would be lost")
        for _ in range(2):  # at every start
            with pytest.raises(
                UserError, match=r"norms-one-by-one.*something would be lost; install megatron-core 0"
            ):
                compat.install()
        only("norms-one-by-one", **changes, risk=None)
        with pytest.warns(UserWarning, match="norms-one-by-one"):
            compat.install()


def test_probes_are_made_once_for_many_blocks(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_gone", {})
    calls: list[str] = []

    def note(what: str, answer: bool) -> bool:
        calls.append(what)
        return answer

    only(
        "norms-one-by-one",
        apply=lambda: calls.append("applied"),
        gone=lambda: note("gone", False),
        works=lambda: note("works", True),
    )
    for checked in (True, True, False):
        with compat.installed(checked=checked):
            calls.append("inside")
    assert " ".join(calls) == "gone applied works inside applied inside gone applied works inside"


def test_what_keeps_data_and_people_safe_is_marked_so() -> None:
    risky = {one.name for one in compat.SHIMS if one.risk}
    assert risky == {"checkpoints-run-pickles", "optimizer-state-shifted-by-padding"}
    assert shim("checkpoints-run-pickles").gone is None  # on, whatever a probe says


def test_a_reader_that_goes_past_the_safe_one_is_seen(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later megatron-core might have it: other names, or another way to the files."""
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed.checkpoint import FileSystemReader

    only("checkpoints-run-pickles")
    monkeypatch.setattr(
        torch_dist, "MCoreLoadPlanner", torch_dist.MCoreLoadPlanner
    )  # what is replaced comes back
    compat.install()
    load = torch_dist.TorchDistLoadShardedStrategy.load

    def past(self: Any, wanted: Any, folder: Any, *more: Any) -> Any:
        FileSystemReader(str(folder)).read_metadata()
        return load(self, wanted, folder, *more)

    only("checkpoints-run-pickles")
    with monkeypatch.context() as patch:
        patch.setattr(torch_dist.TorchDistLoadShardedStrategy, "load", past)
        patch.setattr(
            "megatron.core.dist_checkpointing.serialization._legacy_common_state_exists", lambda _: True
        )
        patch.setattr("megatron.core.dist_checkpointing.serialization.load_common", lambda _: {"step": 0})
        patch.setattr("zoo.engine.megatron.safe_reading.common_state", lambda _: {"step": 0})
        with pytest.raises(UserError, match="could run anything"):
            compat.install()
    with monkeypatch.context() as patch:
        patch.delattr(torch_dist, "_get_filesystem_reader")
        with pytest.raises(UserError, match=r"_get_filesystem_reader.*could run anything"):
            compat.install()


def test_moments_that_are_described_otherwise_end_the_start(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "sharded_param_state_fully_reshardable"
    only("optimizer-state-shifted-by-padding")
    with monkeypatch.context() as patch:
        patch.setattr(DistributedOptimizer, name, lambda self: {})
        with pytest.raises(UserError, match="other moments and weights"):
            compat.install()
    with (
        monkeypatch.context() as patch
    ):  # one that is right is left alone: the shim would shift what it saves
        patch.setattr(DistributedOptimizer, name, inspect.unwrap(getattr(DistributedOptimizer, name)))
        shim("optimizer-state-shifted-by-padding").apply()
        right = getattr(DistributedOptimizer, name)
        compat.install()
        assert getattr(DistributedOptimizer, name) is right
