"""Saves beside training: read under any other layout, refused where they are damaged or would run something, cheap."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.pool import Pool, PoolError

from zoo.checkpoint import integrity
from zoo.config.locate import checkpoints

# Losses as test_training.py has them for this model; a state that is lost or shifted shows from 1e-3 on.
FOLLOWED = {"loss": 5e-5, "mtp_loss": 5e-5, "grad_norm": 2e-4}
RECIPE, SIZE = "qwen35_vl_moe_sft", "tiny-moe"
COMMON = (
    *rank_tasks.ADAMW, "train.steps=4", "train.global_batch=4", "train.warmup_steps=0", "train.lr=3e-3", "train.eps=1e-4", "train.eval_rows=2",
    "train.save_every=2", "train.mtp_loss=0.1", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4",
    "log.tensorboard=false", "log.predictions=0", "export=false", "train.keep=9", "train.clip_grad=0",
)  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "serial": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "pp2 vpp2": (2, ("parallel.pp=2", "parallel.vpp=2")),
    "cp2": (2, ("parallel.cp=2",)),
    "ep2": (2, ("parallel.ep=2",)),
    "tp2 ep2 etp2": (4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")),
    "tp2 pp2": (4, ("parallel.tp=2", "parallel.pp=2")),
    "ep2 dp4": (4, ("parallel.ep=2",)),
}
NAMES = list(LAYOUTS)
RING = set(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
PAIRS = [
    pytest.param(a, b, marks=[] if (a, b) in RING else pytest.mark.slow, id=f"{a} to {b}") for a in NAMES for b in NAMES
]
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The whole run under a layout: its steps, and its folder with the save of step 2."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            folder = root / name.replace(" ", "_")
            done[name] = {"steps": steps_under(pool, name, folder), "folder": folder}
        return done[name]

    return run


def steps_under(pool: Pool, name: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    ranks, parallel = LAYOUTS[name]
    arguments = ([*COMMON, *parallel, f"run.dir={folder}", *more], RECIPE, SIZE)
    return pool.run(ranks, rank_tasks.train, *arguments, timeout=300.0)[0]["steps"]


def goes_on_from(checkpoint: Path, folder: Path) -> Path:
    """A run folder with that checkpoint alone."""
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_save_goes_on_under_any_layout(
    saved: str,
    loaded: str,
    pool: Pool,
    runs: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The step after loading, and the one after that, which has gone through the optimizer's state."""
    wanted = runs("serial")["steps"][2:]
    folder = goes_on_from(runs(saved)["folder"] / "checkpoints" / "iter_2", tmp_path / "run")
    found = steps_under(pool, loaded, folder)
    assert [step["step"] for step in found] == [3, 4]
    errors = {
        f"{key} {mine['step']}": abs(mine[key] - want[key]) / abs(want[key])
        for mine, want in zip(found, wanted, strict=True)
        for key in FOLLOWED
    }
    record_property("errors", {key: f"{error:.1e}" for key, error in errors.items()})
    assert all(error < FOLLOWED[name.split()[0]] for name, error in errors.items()), errors
    if saved == loaded:
        assert [[s["loss"], s["grad_norm"]] for s in found] == [
            [s["loss"], s["grad_norm"]] for s in runs(saved)["steps"][2:]
        ]


SMALL = (
    "train.steps=4", "train.global_batch=2", "train.warmup_steps=0", "train.eval_rows=2", "train.save_every=2", "data.lookahead=4",
    "data.augment=0", "packing.budget=512", "log.tensorboard=false", "log.predictions=0", "export=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with saves of steps 2 and 4, which went through a stage; not to be written to."""
    folder = tmp_path_factory.mktemp("small") / "run"
    overrides = [*SMALL, f"run.dir={folder}", f"run.stage={folder.parent}/stage"]
    pool.run(2, rank_tasks.train, overrides, timeout=300.0)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def go_on(pool: Pool, folder: Path, ranks: int = 2) -> list[int]:
    """Steps that a run does when it is started again for two more."""
    overrides = [*SMALL, f"run.dir={folder}", "train.steps=6"]
    steps = pool.run(ranks, rank_tasks.train, overrides, timeout=300.0)[0]["steps"]
    return [step["step"] for step in steps]


def test_a_checkpoint_is_whole_and_says_what_it_is(finished: Path) -> None:
    first, second = checkpoints(finished)
    for folder in (first, second):
        assert not integrity.faults(folder)
        names = set(json.loads((folder / integrity.MANIFEST).read_text())["files"])
        tensors = {"index.json", "rank0_0.bin", "rank1_0.bin"}
        assert {"state.json", "config.yaml", "hf/config.json", *tensors} <= names
    ours, theirs = (folder / "hf" / "config.json" for folder in (first, second))
    assert ours.read_bytes() == theirs.read_bytes() and not ours.samefile(theirs)  # they are damaged one at a time
    assert json.loads((second / "state.json").read_text())["ranks"] == 2
    assert not list((finished / "checkpoints").glob(".partial*"))
    assert not [path for path in (finished.parent / "stage").rglob("*") if path.is_file()]
    events = [json.loads(line) for line in (finished / "train.jsonl").read_text().splitlines()]
    copied = [event for event in events if event.get("event") == "copied"]
    assert [(event["step"], event["path"]) for event in copied] == [(2, str(first)), (4, str(second))]
    assert (finished / "checkpoints" / "best").resolve() == second  # alone evaluated


def spoil_tensors(folder: Path, share: float = 0.5) -> str:
    """Change a bit; weights lie at the beginning of a file, optimizer state behind them."""
    path = folder / "rank0_0.bin"
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * share))
        byte = file.read(1)
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return path.name


def cut_short(folder: Path) -> str:
    path = folder / "rank0_0.bin"
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def lose(name: str) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        (folder / name).unlink()
        return name

    return change


DAMAGE = {
    "a bit": spoil_tensors, "cut short": cut_short, "no index": lose("index.json"), "no sums": lose(integrity.MANIFEST),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(what: str, pool: Pool, copied: Path) -> None:
    newest = copied / "checkpoints" / "iter_4"
    name = DAMAGE[what](newest)
    assert go_on(pool, copied) == [1, 2, 3, 4, 5, 6]  # of 1 and 2 the log has the lines of before
    events = [json.loads(line) for line in (copied / "train.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event.get("event") == "damaged_checkpoint"]
    assert event["checkpoint"] == "iter_4" and str(newest / name) in event["why"] and event["step"] == 2
    assert (copied / "checkpoints" / "damaged_iter_4").is_dir()
    assert [path.name for path in checkpoints(copied)] == ["iter_4", "iter_6"]  # a new iter_4
    assert not any(integrity.faults(path) for path in checkpoints(copied))


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [False, True], ids=["in one", "in all"])
def test_damage_beside_the_weights_stops_no_run(everywhere: bool, pool: Pool, copied: Path, tmp_path: Path) -> None:
    """It is taken from another checkpoint; where it is whole in none, the run goes on and its next checkpoint has it."""
    damaged = checkpoints(copied) if everywhere else checkpoints(copied)[1:]
    for folder in damaged:
        (folder / "hf" / "tokenizer.json").write_text("{")
        (folder / "hf" / "config.json").write_text("{")
    if everywhere:
        with pytest.raises(PoolError, match=r"UserError: .*iter_4/hf/config.json is damaged.*no whole copy"):
            pool.run(1, rank_tasks.call, "convert", str(copied), str(tmp_path / "out"), timeout=300.0)
    assert go_on(pool, copied) == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in (copied / "train.jsonl").read_text().splitlines()]
    outcomes = {event["file"]: event["outcome"] for event in events if event.get("event") == "damaged_file"}
    assert outcomes.keys() == {"hf/tokenizer.json", "hf/config.json"}
    assert all(("no whole copy" in outcome) == everywhere for outcome in outcomes.values())
    assert not integrity.faults(copied / "checkpoints" / "iter_6")
    assert bool(integrity.faults(copied / "checkpoints" / "iter_4")) == everywhere
    pool.run(1, rank_tasks.call, "convert", str(copied), str(tmp_path / "out"), timeout=300.0)


@pytest.mark.slow
def test_where_none_is_whole_nothing_is_started_anew(pool: Pool, copied: Path) -> None:
    for folder in checkpoints(copied):
        cut_short(folder)
    with pytest.raises(PoolError, match=r"UserError: .*no checkpoint there is whole \(.*iter_4/rank0_0.bin is damaged"):
        go_on(pool, copied)
    assert len(checkpoints(copied)) == 2


@pytest.mark.slow
def test_other_commands_name_the_damaged_file(pool: Pool, copied: Path, tmp_path: Path) -> None:
    """As far as they read it: a conversion needs no moments."""
    spoil_tensors(copied / "checkpoints" / "iter_4")
    pool.run(1, rank_tasks.call, "convert", str(copied), str(tmp_path / "whole"), timeout=300.0)
    spoil_tensors(copied / "checkpoints" / "iter_4", 0.0)
    with pytest.raises(PoolError, match=r"Damaged: .*iter_4/rank0_0.bin is damaged"):
        pool.run(1, rank_tasks.call, "convert", str(copied), str(tmp_path / "out"), timeout=300.0)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def trapped(trap: Trap) -> bytes:
    buffer = io.BytesIO()
    torch.save([trap], buffer)
    return buffer.getvalue()


def trap_index(folder: Path, trap: Trap) -> None:
    (folder / "index.json").write_bytes(pickle.dumps(trap))


def trap_object(folder: Path, trap: Trap) -> None:
    """Add a pickle to a file, and have the index point to it."""
    content, path = trapped(trap), folder / "index.json"
    index = json.loads(path.read_text())
    name, size = index["files"][0][0]
    with (folder / name).open("ab") as file:
        file.write(content)
    index["files"][0][0][1] = size + len(content)
    for key in index["objects"]:
        if key.startswith("random/"):
            index["objects"][key] = [0, size, len(content)]
    path.write_text(json.dumps(index))


def trap_common(folder: Path, trap: Trap) -> None:
    torch.save({"scheduler": trap}, folder / "common.pt")


def point_out(folder: Path, trap: Trap) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["files"][0][0][0] = "../iter_2/rank0_0.bin"
    (folder / "index.json").write_text(json.dumps(index))


TRAPS = {
    "index": (trap_index, "index.json"),
    "random state": (trap_object, "can't be read: its object 'random.* is refused"),
    "common.pt": (trap_common, None),
    "out of the folder": (point_out, "it points out of the folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TRAPS)
def test_nothing_that_a_checkpoint_holds_is_run(what: str, pool: Pool, copied: Path, tmp_path: Path) -> None:
    """The sums are right: whoever changes a file can change them too."""
    newest, sprung = copied / "checkpoints" / "iter_4", tmp_path / "sprung"
    change, message = TRAPS[what]
    change(newest, Trap(sprung))
    (newest / integrity.MANIFEST).unlink()
    integrity.write_manifest(newest, {})
    if message is None:  # nothing reads that file
        assert go_on(pool, copied) == [1, 2, 3, 4, 5, 6]
    else:
        with pytest.raises(PoolError, match=f"UserError: .*{message}"):
            go_on(pool, copied)
    assert not sprung.exists()


@pytest.mark.slow
def test_weights_alone_are_a_checkpoint_too(pool: Pool, tmp_path: Path) -> None:
    """The moments of a run that is resumed from it begin at zero, and that is said; its weights are those of the save."""
    folder = tmp_path / "run"
    overrides = [*SMALL, "train.save=weights", f"run.dir={folder}"]
    whole = pool.run(2, rank_tasks.train, overrides, timeout=300.0)[0]["steps"]
    for checkpoint in checkpoints(folder):
        index = json.loads((checkpoint / "index.json").read_text())
        assert index["tensors"] and not [key for key in index["tensors"] if key.startswith("optimizer.")]
        assert json.loads((checkpoint / "state.json").read_text())["optimizer"] is False
    shutil.rmtree(folder / "checkpoints" / "iter_4")
    again = pool.run(1, rank_tasks.train, overrides, timeout=300.0)[0]["steps"]
    assert [step["step"] for step in again] == [1, 2, 3, 4]
    assert again[2]["loss"] == pytest.approx(whole[2]["loss"], rel=1e-5)  # before an update without moments


@pytest.mark.slow
def test_saves_by_the_clock(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*SMALL, "train.save_every=0", "train.save_minutes=1e-9", "train.keep=9", f"run.dir={folder}"]
    pool.run(2, rank_tasks.train, overrides, timeout=300.0)
    assert [path.name for path in checkpoints(folder)] == ["iter_1", "iter_2", "iter_3", "iter_4"]


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_write_that_fails_is_raised_on_all_ranks_and_leaves_nothing(culprit: int, pool: Pool, tmp_path: Path) -> None:
    """At the next step at the latest after it has failed, naming the file. Both ranks write here: stages of a pipeline."""
    folder = tmp_path / "run"
    overrides = [*SMALL, "train.steps=500", "train.save_every=3", "parallel.pp=2", f"run.dir={folder}"]
    answers = pool.run(2, rank_tasks.train_with_small_files, overrides, culprit, 500_000, timeout=120.0)
    assert {kind for kind, _, _ in answers} == {"OSError"}
    for _, name, step in answers:
        assert str(name).endswith(f"/checkpoints/.partial-iter_3/rank{culprit}_0.bin") and 3 < step < 60
    assert answers[0] == answers[1]
    assert not list((folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_goes_on_from_what_is_left_in_its_stage(pool: Pool, tmp_path: Path) -> None:
    """To the bit, as the run without a stage; the export comes through the stage too."""
    folder, stage = tmp_path / "run", tmp_path / "stage"
    overrides = [*SMALL, f"run.dir={folder}", f"run.stage={stage}"]
    pool.run(2, rank_tasks.train, overrides, timeout=300.0)
    assert [path.name for path in checkpoints(folder)] == ["iter_2", "iter_4"]
    assert not any(integrity.faults(path) for path in checkpoints(folder))
    (mine,) = stage.iterdir()
    assert [path.name for path in mine.rglob("*")] == ["checkpoints"]
    events = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    saves = [(event["event"], event["step"]) for event in events if event.get("event") in ("save", "copied")]
    assert sorted(saves) == [("copied", 2), ("copied", 4), ("save", 2), ("save", 4)]

    shutil.move(folder / "checkpoints" / "iter_4", mine / "checkpoints" / "iter_4")  # as if it had not been copied
    (folder / "checkpoints" / ".partial-iter_4").mkdir()
    again = [*overrides, "train.steps=6", "export=true"]
    steps = pool.run(2, rank_tasks.train, again, timeout=300.0)[0]["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event.get("event") == "resume"]
    assert resumed == [4] and [event["step"] for event in events if event.get("left")] == [4]
    assert [path.name for path in checkpoints(folder)] == ["iter_4", "iter_6"]
    assert not list((folder / "checkpoints").glob(".partial*"))
    assert (folder / "export" / "model.safetensors").exists() and [p.name for p in mine.rglob("*")] == ["checkpoints"]
    plain = tmp_path / "plain"
    pool.run(2, rank_tasks.train, [*SMALL, f"run.dir={plain}"], timeout=300.0)
    wanted = pool.run(2, rank_tasks.train, [*SMALL, f"run.dir={plain}", "train.steps=6"], timeout=300.0)
    exact = ("loss", "grad_norm", "real_tokens")
    assert [[s[k] for k in exact] for s in steps] == [[s[k] for k in exact] for s in wanted[0]["steps"]]
