"""Files of checkpoints, which are kept, and what the log tells of their cost; without a model."""

import json
import os
import pickle
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.bench.saves import SaveBenchOptions, report, run
from zoo.checkpoint import integrity, progress, writer
from zoo.checkpoint.saver import Saved, Saver, _Writing
from zoo.checkpoint.selection import best_of, check_beside_weights, choose, prune, repaired_source
from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.config.locate import checkpoints, look
from zoo.config.schema import ModelConfig, Recipe
from zoo.errors import UserError
from zoo.tools.runs.status import describe, read_status
from zoo.training.saves import Saves
from zoo.watchdog.progress import Progress


def make(run_dir: Path, *steps: int, files: Mapping[str, str] = {"hf/config.json": "{}"}) -> list[Path]:
    """Whole checkpoints, as far as files go."""
    for step in steps:
        folder = run_dir / "checkpoints" / f"iter_{step}"
        (folder / "hf").mkdir(parents=True)
        for name, text in {"state.json": f'{{"step": {step}}}', **files}.items():
            (folder / name).write_text(text)
        integrity.write_manifest(folder, {})
    return checkpoints(run_dir)


def log(run_dir: Path, **losses: float) -> None:
    lines = [{"event": "eval", "step": int(s[1:]), "loss": v, "exact_match": 1 - v} for s, v in losses.items()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "train.jsonl").write_text(text + '{"event": "eval", "st')  # killed while it wrote


def test_the_best_one_is_chosen_on_one_set_of_rows(tmp_path: Path) -> None:
    """A loss on other rows, easier ones say, makes no checkpoint the best."""
    make(tmp_path, 2, 4, 6)
    lines = [(2, 0.1, ["digits:heldout"]), (4, 2.0, ["mine.jsonl"]), (6, 3.0, ["mine.jsonl"])]
    records = [{"event": "eval", "step": step, "loss": loss, "data": data} for step, loss, data in lines]
    for count, best in ((1, 2), (2, 4), (3, 4)):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records[:count]))
        assert best_of(tmp_path, "loss") == tmp_path / "checkpoints" / f"iter_{best}"


def test_sums_find_every_change(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 3)
    assert integrity.faults(folder) == []
    assert set(json.loads((folder / integrity.MANIFEST).read_text())["files"]) == {"hf/config.json", "state.json"}
    original = (folder / "state.json").read_bytes()
    for content in (b"", b"{} ", b"[]"):
        (folder / "state.json").write_bytes(content)
        assert integrity.faults(folder) == [
            f"{folder}/state.json is damaged: its checksum is not the one in integrity.json"
        ]
    (folder / "state.json").write_bytes(original)
    (folder / "more").write_text("")
    (folder / "hf" / ".nfs000000000123").write_text("")
    assert integrity.faults(folder) == []  # they are somebody's, and nothing reads them
    (folder / "hf" / "config.json").unlink()
    assert integrity.faults(folder) == [f"{folder}/hf/config.json is missing"]
    (folder / "hf" / "config.json").symlink_to("/etc/hostname")
    assert integrity.faults(folder) == [f"{folder}/hf/config.json leads out of the checkpoint"]


@pytest.mark.parametrize("files", [None, 3, {"state.json": 3}, {"a\0": "x"}, "", "[]", "{", "[" * 10_000, "sha256"])
def test_sums_that_are_none(files: Any, tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 3)
    content = {"files": {}, "algorithm": "sha256"} if files == "sha256" else {"files": files, "algorithm": "xxh3_128"}
    is_text = isinstance(files, str) and files != "sha256"
    (folder / integrity.MANIFEST).write_text(files if is_text else json.dumps(content))
    (fault,) = integrity.faults(folder)
    assert fault.startswith(f"{folder}/integrity.json") and any(
        why in fault for why in ("can't be read", "too deep", "sums by 'sha256'; wanted xxh3_128")
    )


def test_sums_of_names_that_lead_elsewhere(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 3)
    told = json.loads((folder / integrity.MANIFEST).read_text())
    told["files"]["../../secret"] = disk.digest(folder / "state.json")
    (folder / integrity.MANIFEST).write_text(json.dumps(told))
    (tmp_path / "secret").write_text("{}")
    assert integrity.faults(folder) == [f"{folder}/../../secret leads out of the checkpoint"]


def test_ranks_share_the_work(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 3)
    for name in ("state.json", "hf/config.json"):
        (folder / name).write_text("changed")
    shares = [integrity.faults(folder, rank, 3) for rank in range(3)]
    assert sorted(map(len, shares)) == [0, 1, 1] and len({fault for share in shares for fault in share}) == 2


def test_a_folder_is_published_in_the_place_of_one_that_was_there(tmp_path: Path) -> None:
    (former,) = make(tmp_path, 3)
    partial = former.with_name(".partial-iter_3")
    partial.mkdir()
    (partial / "state.json").write_text('{"new": 1}')
    integrity.publish(partial, former)
    assert (former / "state.json").read_text() == '{"new": 1}' and not (former / "hf").exists()
    assert os.listdir(former.parent) == ["iter_3"]


def test_files_that_are_alike_are_made_once_and_are_no_names_of_one_file(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "templates").mkdir()
        (folder / "templates" / "a.jinja").write_text("a")
        (folder / "config.json").write_text("{}")

    kept = integrity.CachedFiles(make)
    for name in ("one", "two"):
        kept.write(tmp_path / name)
        assert integrity.files_of(tmp_path / name) == ["config.json", "templates/a.jinja"]
    assert made == [tmp_path / "one"]
    assert (tmp_path / "two" / "config.json").read_text() == "{}"
    assert not (tmp_path / "one" / "config.json").samefile(tmp_path / "two" / "config.json")


def save(run_dir: Path, *steps: int) -> list[Path]:
    """Whole checkpoints of one run: files beside the weights are alike."""
    return make(run_dir, *steps, files={"hf/tokenizer.json": "words", "config.yaml": "seed: 1"})


@pytest.mark.parametrize("name", ["hf/tokenizer.json", "config.yaml"])
@pytest.mark.parametrize("how", ["changed", "missing", "a link"])
def test_a_file_beside_the_weights_is_restored_from_another_checkpoint(
    name: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = save(tmp_path, 2, 4)
    (newest / name).unlink()
    if how == "changed":
        (newest / name).write_text("wards")
    elif how == "a link":
        (newest / name).symlink_to(older / name)
    found = choose(tmp_path)
    assert found.folder == newest and not found.passed_over
    assert str(newest / name) in found.side_files[name] and str(older / name) in found.side_files[name]
    assert not integrity.faults(newest) and not integrity.faults(older)
    assert found.side_files[name] in capsys.readouterr().err


@pytest.mark.parametrize("place", ["export", "base", "elsewhere"])
def test_it_is_restored_from_the_export_or_the_source_too(place: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (newest,) = save(run, 4)
    source = tmp_path / place if place == "elsewhere" else run / place
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("words")
    (newest / "state.json").write_text(json.dumps({"step": 4, "weights": {"init": str(source)}}))
    (newest / "integrity.json").unlink()
    integrity.write_manifest(newest, {})
    (newest / "hf" / "tokenizer.json").write_text("wards")
    located = repaired_source(Recipe(model=ModelConfig(init=str(run))))
    assert located == look(str(run))
    assert not integrity.faults(newest)


def test_where_it_is_whole_nowhere_the_run_goes_on_and_a_conversion_says_so(tmp_path: Path) -> None:
    for folder in save(tmp_path, 2, 4):
        (folder / "hf" / "tokenizer.json").write_text("wards")
    found = choose(tmp_path)
    assert found.folder is not None and found.folder.name == "iter_4" and not found.passed_over
    assert "The weights are whole and the run resumes from them" in found.side_files["hf/tokenizer.json"]
    located = look(str(tmp_path))
    assert located is not None
    with pytest.raises(
        UserError, match=r"tokenizer\.json is damaged.*no whole copy of it was found.*Go on with the run"
    ):
        check_beside_weights(located)


def test_nothing_is_written_where_a_manifest_points(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 2, 4)
    told = json.loads((newest / integrity.MANIFEST).read_text())
    told["files"]["hf/../../../out"] = disk.digest(older / "config.yaml")
    (newest / integrity.MANIFEST).write_text(json.dumps(told))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "out").write_text("seed: 1")
    found = choose(tmp_path)
    assert found.folder == older and not (tmp_path / "out").exists()


def test_weights_that_are_damaged_are_not_taken_from_elsewhere(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 2, 4)
    (newest / "state.json").write_text('{"step": 5}')
    found = choose(tmp_path)
    assert found.folder == older and "state.json is damaged" in found.passed_over["iter_4"]
    assert not newest.exists() and newest.with_name("damaged_iter_4").is_dir()


def test_a_checkpoint_is_of_the_step_inside_whatever_its_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 2, 4, 6)
    folder = tmp_path / "checkpoints"
    (folder / "iter_2").rename(folder / "iter_900")
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_900", "iter_4", "iter_6"]
    assert choose(tmp_path).folder == folder / "iter_6"
    (folder / "iter_6").rename(folder / "iter_1")
    assert choose(tmp_path).folder == folder / "iter_1"
    assert f"{folder}/iter_1 holds step 6" in capsys.readouterr().err
    log(tmp_path, _2=0.1, _4=0.2, _6=0.3)
    assert best_of(tmp_path, "loss") == folder / "iter_900"
    prune(tmp_path, 1, "loss")
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_900", "iter_1"]


def test_what_somebody_has_put_beside_a_checkpoint_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6)
    (tmp_path / "checkpoints" / "iter_2" / "notes.txt").write_text("mine")
    prune(tmp_path, 1, None)
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_2", "iter_6"]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6, 8, 10)
    log(tmp_path, _2=0.5, _4=0.2, _6=0.2, _8=float("nan"), _12=0.1)
    assert best_of(tmp_path, "loss") == tmp_path / "checkpoints" / "iter_6"  # of equals the newest
    assert best_of(tmp_path, None) is None
    prune(tmp_path, 1, "loss")
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_6", "iter_10"]
    best = tmp_path / "checkpoints" / "best"
    assert best.is_symlink() and best.resolve().name == "iter_6"
    log(tmp_path, _6=0.2, _10=0.3)
    prune(tmp_path, 1, "loss")
    assert best.resolve().name == "iter_6"
    log(tmp_path, _6=0.2, _10=0.1)
    prune(tmp_path, 1, "loss")
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_10"] and best.resolve().name == "iter_10"


def test_without_a_figure_the_newest_alone_stay(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6)
    prune(tmp_path, 2, "exact_match")
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_4", "iter_6"]
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_run_without_checkpoints_and_one_without_a_whole_one(tmp_path: Path) -> None:
    assert choose(tmp_path).folder is None
    (folder,) = make(tmp_path, 2)
    (folder / integrity.MANIFEST).unlink()
    with pytest.raises(UserError, match=r"no checkpoint there is whole \(.*integrity.json is missing\)"):
        choose(tmp_path)


def step(number: int, ms: float) -> dict[str, Any]:
    return {"step": number, "step_ms": ms, "loss": 1.0}


def test_the_cost_of_saves() -> None:
    save = {"event": "save", "stall_ms": 5.0, "write_ms": 150.0}
    lines = [step(1, 900.0), step(2, 100.0), step(3, 110.0), {**save, "step": 2}, step(4, 100.0)]
    lines += [step(5, 100.0), step(6, 110.0), {**save, "step": 5}, step(7, 100.0), {**save, "step": 7}]
    found = report(lines)
    assert (found.saves, found.save_every, found.step_ms, found.beside_ms) == (2, 3, 100.0, 110.0)
    assert found.share_of_step == 0.05 and found.share_of_run == pytest.approx(30 / 630)
    assert found.copy_ms is None
    staged = report([*lines[:5], {"event": "copied", "step": 2, "copy_ms": 800.0}, *lines[5:]])
    assert (staged.copy_ms, staged.steps_beside, staged.saves) == (800.0, 3, 2)
    with pytest.raises(UserError, match="too little to tell"):
        report(lines[:3])
    with pytest.raises(UserError, match=r"no train\.jsonl there"):
        run(SaveBenchOptions("nowhere"))


def test_how_far_a_save_is_stands_beside_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints" / ".partial-iter_40"
    folder.mkdir(parents=True)
    assert progress.saving(tmp_path) is None
    progress.begin(folder, 40, 30_000_000)
    (folder / "rank0_0.bin").write_bytes(bytes(8_000_000))
    (folder / "rank1_0.bin").write_bytes(bytes(4_000_000))
    began = (folder / progress.FILE).stat().st_mtime
    monkeypatch.setattr(progress, "file_clock", lambda folder: began + 2)
    found = progress.saving(tmp_path)
    assert found is not None and (found.step, str(found)) == (40, "saving 12 of 30.0 MB, 6.0 MB/s")
    progress.end(folder)
    assert progress.saving(tmp_path) is None


class Log:
    """What a run's log was given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def event(self, name: str, step: int, **details: Any) -> None:
        self.events.append({"event": name, "step": step, **details})

    def say(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.parametrize("before", [None, {"event": "save", "step": 2, "write_ms": 2e4, "bytes": 2e9}])
def test_a_save_that_will_last_too_long_is_warned_of_before_the_first_one(
    before: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rate of the run's last save, or by a test of its disk."""
    run = SimpleNamespace(dir=str(tmp_path), save_within=110.0)
    recipe: Any = SimpleNamespace(run=run, train=SimpleNamespace(save="full"))
    if before is not None:
        (tmp_path / "train.jsonl").write_text(json.dumps(before) + "\n")
    monkeypatch.setattr(disk, "rate", lambda folder: 1e8)
    world: Any = SimpleNamespace(device=torch.device("cpu"), size=1)
    saver, log = Saver(recipe, world, lambda folder: None), Log()
    saves = Saves(saver, log, recipe, Progress(), SimpleNamespace(), None)  # type: ignore[arg-type]
    saver._expect(1e10)
    assert saver.expected_seconds == 100.0
    saves.expect(saver.expected_seconds)
    assert not log.messages
    saver._expect(2e10)
    for _ in range(2):
        saves.expect(saver.expected_seconds)
    saves.log_published(Saved(tmp_path, 4, 1.0, 300.0, 10**9))
    (said,) = log.messages
    assert (
        "a save takes about 200 s" in said and "run.save_within=400" in said and "after 110 s (run.save_within)" in said
    )
    assert log.events == [
        {"event": "save", "step": 4, "path": str(tmp_path), "stall_ms": 1e3, "write_ms": 3e5, "bytes": 10**9}
    ]


def test_the_removal_of_older_checkpoints_is_no_part_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take a quarter of a second for each GB that is removed."""
    done = []
    monkeypatch.setattr(writer, "publish", lambda *_: done.append("publish"))
    monkeypatch.setattr(writer, "prune", lambda *_: done.append("prune") or time.sleep(1.0))
    control: Any = SimpleNamespace(
        rank=0, size=1, gather=lambda value: [value], together=lambda stage: stage(), collect=lambda mine: [mine]
    )
    recipe: Any = SimpleNamespace(train=SimpleNamespace(keep=1, keep_best=None))
    copied = CpuCopy(torch.device("cpu"))
    copied.take([], {"a": b"b"})
    request = writer.SaveRequest(tmp_path, {"step": 3}, recipe, None)  # type: ignore[arg-type]
    writing = _Writing(copied, request, control, time.monotonic(), torch.device("cpu"))
    saved = writing.result()
    assert done == ["publish", "prune"]
    assert (saved.size, writing.ended) == (copied.size, True)
    assert saved.write_seconds < 0.5


def test_the_test_of_a_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TESTED", 2**16)
    assert disk.rate(tmp_path) > 0 and not os.listdir(tmp_path)


def test_what_is_read_is_not_removed(tmp_path: Path) -> None:
    """A hold lasts as long as the place that `look` gave, also in a process that it was handed to."""
    save(tmp_path, 2)
    place = look(str(tmp_path))
    assert place is not None
    save(tmp_path, 4, 6)
    prune(tmp_path, 1, None)
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_2", "iter_6"]
    copy = pickle.loads(pickle.dumps(place))
    del place
    prune(tmp_path, 1, None)
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_2", "iter_6"]
    del copy
    prune(tmp_path, 1, None)
    assert [path.name for path in checkpoints(tmp_path)] == ["iter_6"]


def test_a_run_that_saves_and_removes_is_read_all_the_same(tmp_path: Path) -> None:
    """Saves follow one another as fast as the disk takes them; each look finds a checkpoint that stays while it is read."""
    ended = threading.Event()

    def train() -> None:
        for step in range(1, 120):
            (made,) = save(tmp_path / f"made_{step}", step)
            integrity.publish(made, tmp_path / "checkpoints" / made.name)
            prune(tmp_path, 1, None)
        ended.set()

    save(tmp_path, 0)
    (tmp_path / "train.jsonl").write_text("")
    thread = threading.Thread(target=train)
    thread.start()
    looks = 0
    while not ended.is_set():
        place = look(str(tmp_path))
        assert place is not None
        for _ in range(3):
            assert integrity.faults(place.folder) == []
            time.sleep(0.001)
        assert describe(read_status(tmp_path))
        looks += 1
    thread.join()
    assert looks > 10
