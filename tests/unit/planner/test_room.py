"""What a run's saves take is refused before training: host memory of the copy, and the disk of what is kept."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zoo.errors import ConfigError
from zoo.planner import plan


def recipe(folder: Path, **train: Any) -> Any:
    settings = {"keep": 2, "save_every": 100, "save_minutes": None, "steps": 1000, **train}
    return SimpleNamespace(train=SimpleNamespace(**settings), run=SimpleNamespace(dir=str(folder), stage=None))


@pytest.mark.parametrize(
    ("train", "count"),
    [({}, 3), ({"keep": 5}, 6), ({"steps": 150}, 2), ({"save_every": 0}, 1), ({"save_every": 0, "save_minutes": 5.0}, 3)],
)  # fmt: skip
def test_a_disk_that_is_too_small_for_what_is_kept(
    train: dict[str, Any], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    needed = count * (1020 * 10**6 + 2**20)  # the tensors alone do not fill a disk: files beside them and inodes do too
    for free, fits in ((needed, True), (needed - 1, False), (count * 10**9, False)):
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        text = rf"takes about 1\.0 GB, {count} of them are there at once"
        with nullcontext() if fits else pytest.raises(ConfigError, match=text):
            plan._refuse_small_disk(recipe(folder, **train), 10**9)


def test_checkpoints_that_are_there_take_no_further_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 10**6))
    with pytest.raises(ConfigError):
        plan._refuse_small_disk(recipe(tmp_path), 10**6)
    with pytest.raises(ConfigError, match=r"the export 5\.0 GB, and the disk"):
        plan._refuse_small_disk(recipe(tmp_path), 0, 5 * 10**9)
    (tmp_path / "checkpoints" / "iter_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iter_2" / "rank0_0.bin").write_bytes(bytes(4 * 10**6))
    plan._refuse_small_disk(recipe(tmp_path), 10**6)


def test_a_stage_holds_two_checkpoints_beside_what_the_run_folder_keeps_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = recipe(tmp_path / "run")
    staged.run.stage = str(tmp_path / "stage")
    disks = {"stage": 1, "run": 2}
    monkeypatch.setattr(plan, "_device", lambda folder: disks.get(folder.parent.name, disks["run"]))
    needed = 2 * (1020 * 10**6 + 2**20)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        text = r"run\.stage=.*takes about 1\.0 GB, 2 of them are there at once, and the"
        with nullcontext() if fits else pytest.raises(ConfigError, match=text):
            plan._refuse_small_stage(staged, 10**9)
    disks["stage"] = 2
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed * 5 // 2 - 1))
    with pytest.raises(ConfigError, match=r"beside those of run\.dir on the same disk"):
        plan._refuse_small_stage(staged, 10**9)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed * 5 // 2))
    plan._refuse_small_stage(staged, 10**9)


def test_a_host_that_is_too_small_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "host_memory", lambda ranks, process: 20 * 10**9 // ranks)
    plan._refuse_small_host(9e9, 0.0, 2)
    with pytest.raises(ConfigError, match=r"copies 11\.0 GB of each rank .* has 10\.0 GB to give; use more hosts"):
        plan._refuse_small_host(11e9, 0.0, 2)
    with pytest.raises(ConfigError, match=r"and optimizer state 5\.0 GB; .* lower$"):
        plan._refuse_small_host(9e9, 0.0, 2, 5e9)
    with pytest.raises(ConfigError, match=r"and training takes 17\.0 GB; "):
        plan._refuse_small_host(4e9, 17e9, 1)
    monkeypatch.setattr(plan, "host_memory", lambda ranks, process: 0)  # not known
    plan._refuse_small_host(4e9, 17e9, 1)
