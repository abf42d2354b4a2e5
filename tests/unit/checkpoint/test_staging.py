"""Checkpoints on their way from run.stage to the run folder: dealt out, checked, tried again, whole or not there; without a model."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.disks import mounted

from zoo.checkpoint import integrity, progress
from zoo.checkpoint.selection import choose
from zoo.checkpoint.staging import copying, leftovers
from zoo.checkpoint.staging.copying import Copier, Files, Meter, copy_checkpoint, deal
from zoo.checkpoint.staging.exports import write_through
from zoo.checkpoint.staging.stage import Stage
from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.disk import Damaged
from zoo.config.compose import load_recipe
from zoo.config.derived import stage_folder
from zoo.config.locate import checkpoints
from zoo.config.validate import validate
from zoo.errors import ConfigError, UserError

RECIPE: Any = SimpleNamespace(train=SimpleNamespace(keep=2, keep_best=None))


class Exchange:
    """What threads in the place of ranks exchange their values through."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=30)


class ControlGroup:
    """`zoo.checkpoint.writer.ControlGroup` of one of these threads."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank

    def gather(self, value: Any) -> list[Any]:
        self.exchange.values[self.rank] = value
        self.exchange.barrier.wait()
        found = list(self.exchange.values)
        self.exchange.barrier.wait()
        return found

    def together(self, stage: Callable[[], Any]) -> Any:
        result, failure = None, None
        try:
            result = stage()
        except Exception as error:
            failure = error
        for raised in self.gather(failure):
            if raised is not None:
                raise failure or raised
        return result


def stages(root: Path, nodes: list[list[int]]) -> list[Stage]:
    """A stage for each rank; ranks of a node share its folder."""
    count = sum(map(len, nodes))
    exchange, found = Exchange(count), {}
    for number, ranks in enumerate(nodes):
        folder = root / f"node{number}" / "run-01234567"
        (folder / "checkpoints").mkdir(parents=True)
        for rank in ranks:
            control: Any = ControlGroup(exchange, rank)
            found[rank] = Stage(folder, root / "run", rank, count, tuple(ranks), control)
    (root / "run").mkdir()
    return [found[rank] for rank in range(count)]


def on_all(stages: list[Stage], action: Callable[[Stage], Any]) -> list[Any]:
    """What each rank's action returns or raises."""
    results: list[Any] = [None] * len(stages)

    def one(stage: Stage) -> None:
        try:
            results[stage.rank] = action(stage)
        except Exception as error:
            results[stage.rank] = error

    threads = [threading.Thread(target=one, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def save(stages: list[Stage], step: int, size: int = 5000) -> str:
    """A staged checkpoint as the ranks write it: each its file on its node, the rest on the first rank's."""
    name, known = f"iter_{step}", {}
    for stage in stages:
        folder = stage.staged(name)
        folder.mkdir(exist_ok=True)
        file = f"rank{stage.rank}_0.bin"
        (folder / file).write_bytes(os.urandom(size + stage.rank))
        known[file] = disk.digests(folder / file)
    folder = stages[0].staged(name)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    integrity.write_manifest(folder, known)
    return name


def log(run_dir: Path, step: int) -> None:
    lines = [json.dumps({"step": one, "loss": 1.0}) for one in range(1, step + 1)]
    (run_dir / "train.jsonl").write_text("\n".join(lines) + "\n")


def copy(stage: Stage, name: str = "iter_4") -> Any:
    return copy_checkpoint(stage, name, RECIPE)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.checkpoint.staging.stage.PAUSES", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("nodes", [[[0]], [[0, 1]], [[0, 2], [1, 3]]])
def test_a_checkpoint_arrives_whole_from_all_nodes(nodes: list[list[int]], tmp_path: Path) -> None:
    ranks = stages(tmp_path, nodes)
    name = save(ranks, 4)
    contents = {path.name: path.read_bytes() for stage in ranks for path in stage.staged(name).glob("*.bin")}
    found = on_all(ranks, copy)
    target = tmp_path / "run" / "checkpoints" / name
    assert [(one.folder, one.step) for one in found] == [(target, 4)] * len(ranks)
    assert found[0].size == sum(map(len, contents.values())) and len(contents) == len(ranks)
    assert not integrity.faults(target)
    assert {name: (target / name).read_bytes() for name in contents} == contents
    assert os.listdir(target.parent) == [name]
    assert not [path for stage in ranks for path in (stage.folder / "checkpoints").iterdir()]


def test_files_are_dealt_to_ranks_that_see_them_by_bytes() -> None:
    here, there = {"a": 8, "b": 5, "c": 4, "shared": 1}, {"d": 9, "shared": 1}
    names = {name: "" for name in (*here, *there)}
    parts = deal([here, here, there], names, Path("iter_4"))
    assert parts[2] == ["d"] and sorted(parts[0] + parts[1]) == ["a", "b", "c", "shared"]
    loads = [sum(here[name] for name in part) for part in parts[:2]]
    assert sorted(loads) == [9, 9]
    with pytest.raises(UserError, match=r"iter_4: no rank sees its file gone; it lies on a node"):
        deal([here], {"gone": ""}, Path("iter_4"))


@pytest.mark.parametrize("file", ["rank1_0.bin", "hf/config.json"])
def test_what_is_damaged_in_the_stage_is_not_published(file: str, tmp_path: Path) -> None:
    ranks = stages(tmp_path, [[0], [1]])
    save(ranks, 4)
    path = next(stage.staged("iter_4") / file for stage in ranks if (stage.staged("iter_4") / file).exists())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = on_all(ranks, copy)
    assert [type(one) for one in found] == [Damaged, Damaged]
    assert str(found[0]).startswith(f"{path} is damaged: its checksum is not the one in integrity.json")
    assert not list((tmp_path / "run" / "checkpoints").iterdir()) and path.exists()


def test_a_damaged_file_is_told_to_other_processes() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(Damaged({"a": "a is damaged", "b": "b is damaged"})))
    assert again.faults == {"a": "a is damaged", "b": "b is damaged"} and "1 more" in str(again)


def failing(times: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Have the first so many writes of rank 1's file fail as a lost server does."""
    failed: list[Path] = []
    write = copying._write

    def sometimes(file: Any, data: memoryview, path: Path) -> None:
        if path.name == "rank1_0.bin" and len(failed) < times:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        write(file, data, path)

    monkeypatch.setattr(copying, "_write", sometimes)
    return failed


def test_a_write_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = stages(tmp_path, [[0, 1]])
    save(ranks, 4)
    log(tmp_path / "run", 5)
    failed = failing(3, monkeypatch)
    assert [type(one).__name__ for one in on_all(ranks, copy)] == ["Copied", "Copied"] and len(failed) == 3
    assert not integrity.faults(tmp_path / "run" / "checkpoints" / "iter_4")
    assert capsys.readouterr().err.count("the checkpoint of step 4 is not copied to the run folder yet") == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    retried = [line for line in lines if line.get("event") == "copy_retry"]
    assert len(retried) == 3 and "rank1_0.bin: Input/output error" in retried[0]["why"]


def test_a_copy_that_is_given_up_says_where_the_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = stages(tmp_path, [[0, 1]])
    save(ranks, 4)
    failing(99, monkeypatch)
    for error in on_all(ranks, copy):
        assert isinstance(error, UserError) and isinstance(error.__cause__, OSError)
        assert f"{tmp_path}/run/checkpoints/iter_4: the checkpoint can't be copied there (" in str(error)
        assert f"It is whole in {ranks[0].staged('iter_4')}" in str(error)
    assert not integrity.faults(ranks[0].staged("iter_4"))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_full_disk_of_the_run_folder_loses_nothing(tmp_path: Path) -> None:
    (stage,) = stages(tmp_path, [[0]])
    save([stage], 4, size=2 * 2**20)
    log(tmp_path / "run", 4)
    with mounted(tmp_path / "run" / "checkpoints", "size=1m") as full:
        # The small files are written at the same time: any of them may be the first that has no room.
        with pytest.raises(UserError, match=r"partial-iter_4/\S+: No space left on device\).*It is whole in"):
            copy(stage)
        assert not list(full.iterdir())
    leftovers.finish(stage, RECIPE)
    assert not integrity.faults(tmp_path / "run" / "checkpoints" / "iter_4")
    assert not list((stage.folder / "checkpoints").iterdir())


def no_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """As object stores that are mounted as folders: files are renamed, folders are not."""
    rename = os.replace

    def refuse(source: Any, target: Any) -> None:
        if os.path.isdir(source):
            raise OSError(errno.ENOTSUP, "Operation not supported", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)


def test_where_folders_are_not_renamed_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = stages(tmp_path, [[0, 1]])
    for step in (2, 4):
        save(ranks, step)
    target, order = tmp_path / "run" / "checkpoints" / "iter_4", []
    no_renames(monkeypatch)
    write = copying._write

    def noted(file: Any, data: memoryview, path: Path) -> None:
        assert path.parent == target or path.parent == target / "hf"
        order.append(path.name)
        assert "state.json" in order or not checkpoints(tmp_path / "run"), "a part is taken for a checkpoint"
        write(file, data, path)

    monkeypatch.setattr(copying, "_write", noted)
    assert on_all(ranks, copy)[0].folder == target
    assert order[-2:] == ["state.json", "integrity.json"] and len(order) == 5
    assert not integrity.faults(target) and os.listdir(target.parent) == ["iter_4"]
    integrity.remove([target])
    assert not os.listdir(target.parent)


@pytest.mark.parametrize("name", ["iter_8", ".partial-iter_8"])
def test_a_folder_without_its_manifest_is_never_taken(name: str, tmp_path: Path) -> None:
    """As a copy leaves it that was killed on a file system which renames no folders."""
    (stage,) = stages(tmp_path, [[0]])
    for step in (4, 8):
        save([stage], step)
    copy(stage)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(stage.staged("iter_8"), folder / name)
    (folder / name / integrity.MANIFEST).unlink()
    assert choose(tmp_path / "run").folder == folder / "iter_4"
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["iter_4"]


def test_what_a_killed_run_has_left_is_finished_oldest_first(tmp_path: Path) -> None:
    """One is in the run folder already, one is half copied, one was not begun, one is no whole checkpoint."""
    ranks = stages(tmp_path, [[0, 1], [2]])
    for step in (2, 4, 6, 8):
        save(ranks, step)
    shutil.copytree(ranks[0].staged("iter_2"), tmp_path / "kept")
    on_all(ranks, lambda stage: copy(stage, "iter_2"))
    shutil.copytree(tmp_path / "kept", ranks[0].staged("iter_2"))
    half = tmp_path / "run" / "checkpoints" / ".partial-iter_4"
    half.mkdir()
    (half / "rank0_0.bin").write_bytes(b"half")
    (ranks[0].staged("iter_8") / integrity.MANIFEST).unlink()
    log(tmp_path / "run", 9)
    assert on_all(ranks, lambda stage: leftovers.finish(stage, RECIPE)) == [None] * 3
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["iter_4", "iter_6"]  # keep=2
    assert not any(integrity.faults(path) for path in checkpoints(tmp_path / "run"))
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["iter_4", "iter_6"]
    assert not [path for stage in ranks for path in (stage.folder / "checkpoints").iterdir()]
    lines = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "copied"] == [4, 6]


@pytest.mark.parametrize("what", ["another run's", "no node", "damaged"])
def test_what_must_not_be_taken_is_put_aside(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is removed: where a mount is missing, an empty run folder looks like a new run."""
    ranks = stages(tmp_path, [[0], [1]])
    save(ranks, 4)
    if what != "another run's":
        log(tmp_path / "run", 4)
    if what == "no node":
        shutil.rmtree(ranks[1].staged("iter_4"))
    if what == "damaged":
        (ranks[1].staged("iter_4") / "rank1_0.bin").write_bytes(b"?")
    for _ in range(2):
        assert on_all(ranks, lambda stage: leftovers.finish(stage, RECIPE)) == [None] * 2
    assert not checkpoints(tmp_path / "run")
    assert (ranks[0].folder / "checkpoints" / "left_iter_4" / "rank0_0.bin").exists()
    why = {"another run's": "train.jsonl has no steps", "no node": "no rank sees its file", "damaged": "is damaged"}
    said = capsys.readouterr().err
    assert said.count("is not taken") == 1 and why[what] in said and "left_iter_4; remove it when" in said


def test_two_checkpoints_are_staged_at_most_while_the_run_folder_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copier takes them in request, tells how far it is, and raises at the next look what has failed."""
    (stage,) = stages(tmp_path, [[0]])
    write, copier = copying._write, Copier(stage, RECIPE)

    def throttled(file: Any, data: memoryview, path: Path) -> None:
        for at in range(0, len(data), 1000):
            time.sleep(0.01)
            write(file, data[at : at + 1000], path)

    monkeypatch.setattr(copying, "_write", throttled)
    for step in (2, 4):
        copier.put(save([stage], step, 20_000))
    assert copier.left == 2 and copier.unreported and not copier.ready
    while not (copier.under_way() and "copying 0" not in str(copier.under_way())):
        time.sleep(0.001)
    assert str(copier.under_way()).split(",")[0].endswith("of 20.0 kB to run.dir")
    copier.wait(1)
    assert copier.left == 1 and [path.name for path in checkpoints(tmp_path / "run")] == ["iter_2"]
    assert copier.take().step == 2 and copier.unreported
    copier.put(save([stage], 6))
    (stage.staged("iter_6") / "rank0_0.bin").write_bytes(b"?")
    assert copier.take().step == 4
    with pytest.raises(Damaged):
        copier.wait(0)
    with pytest.raises(Damaged):
        copier.take()


def test_how_far_a_copy_is_stands_beside_its_files(tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / ".partial-iter_4"
    into = tmp_path / "checkpoints" / "iter_4"
    for folder in (partial, into):
        folder.mkdir(parents=True)
    (into / "rank0_0.bin").write_bytes(bytes(500_000))
    progress.begin(partial, 4, 2_000_000, copied_to="iter_4")
    found = progress.saving(tmp_path)
    assert found is not None and (found.step, found.written, found.copying) == (4, 500_000, True)
    assert str(found).startswith("copying 0.5 of 2.0 MB to run.dir, ")
    meter = Meter()
    assert meter.state() is None
    meter.begin(4, 100, 20)
    meter.add(5)
    half = meter.state()
    assert half is not None and (half.written, half.total, half.copying) == (25, 100, True)


def test_files_that_are_copied_are_not_copied_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)
    files = Files(source, target, {})
    files.copy(["a"])
    (target / "a").write_text("done")
    files.copy(["a", "b"])
    assert [(target / name).read_text() for name in ("a", "b")] == ["done", "b"]


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]])
def test_an_export_goes_through_a_stage_that_all_ranks_share(nodes: list[list[int]], tmp_path: Path) -> None:
    """A model card of one's own stays, and a folder that is not zoo's is renamed."""
    ranks, target = stages(tmp_path, nodes), tmp_path / "run" / "export"
    target.mkdir()
    (target / "README.md").write_text("mine")
    made: list[Path] = []

    def fill(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text("zoo's")
        (folder / "model.safetensors").write_bytes(b"weights")

    def export(stage: Stage) -> None:
        def write(folder: Path) -> None:  # ranks leave it together, as they leave an export
            made.append(folder)
            stage.control.together(lambda: fill(folder) if stage.is_main else None)

        write_through(stage, target, 4, write)

    found = on_all(ranks, export)
    assert found == [None, None]
    if len(nodes) == 2:
        assert made == [target, target]
        return
    assert made == [ranks[0].folder / "export"] * 2 and not made[0].exists()
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert (target / "README.md").read_text() == "zoo's"
    assert (target.with_name("export.kept-1") / "README.md").read_text() == "mine"
    (target / "README.md").write_text("mine, of zoo's folder")
    assert on_all(ranks, export) == [None, None]
    assert (target / "README.md").read_text() == "mine, of zoo's folder"
    assert json.loads((target / "zoo_files.json").read_text())["files"].keys() >= {"model.safetensors"}


def test_the_stage_of_a_run_is_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = ["size=tiny", "hardware=cpu", "run.stage=~/stage"]
    one, other = (validate(load_recipe("qwen3_vl_sft", [*given, f"run.dir={tmp_path}/{name}/run"]), 1) for name in "ab")
    assert one.run.stage == str(tmp_path / "home" / "stage")
    first, second = stage_folder(one), stage_folder(other)
    assert first is not None and second is not None and first != second
    assert first.parent == second.parent == tmp_path / "home" / "stage" and first.name.startswith("run-")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert stage_folder(one.replace({"run.dir": str(tmp_path / "link" / "run")})) == first
    assert stage_folder(replace(one, run=replace(one.run, stage=None))) is None


@pytest.mark.parametrize(("stage", "run"), [("a", "a/run"), ("a/run/stage", "a/run"), ("a", "b/../a")])
def test_a_stage_within_the_run_folder_is_refused(stage: str, run: str, tmp_path: Path) -> None:
    given = [f"run.stage={tmp_path / stage}", f"run.dir={tmp_path / run}", "size=tiny", "hardware=cpu"]
    with pytest.raises(ConfigError, match=r"run\.stage=.*: it is in run\.dir=.*give a folder of its own"):
        validate(load_recipe("qwen3_vl_sft", given), 1)
