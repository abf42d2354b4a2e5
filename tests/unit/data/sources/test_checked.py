"""Rows of a file of lines are read once and kept: never a stale, cut or half-written table, and no other rows than before."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from support.row_files import dialogue, write_jsonl, write_tar

from zoo.config.entries import parse_entry
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sources import identity, row_set, tars
from zoo.data.sources.kept import checked, store
from zoo.data.sources.kept.columns import record_batch
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import Row, read_rows
from zoo.data.sources.tables import open_table

EVERY = ("text", "image", "video", "audio")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For rows, beside a cache folder of its own; rows of any file are kept."""
    monkeypatch.setattr(checked, "KEPT_MB", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def fail(error: Exception) -> None:
    raise error


def opened(path: str, on_bad: Callable[[RowError], None] = fail, **entry: Any) -> list[Row]:
    rows = open_rows(
        [parse_entry({"path": path, **entry}, "")], DataConfig(on_error="skip", outside_root=True), EVERY, on_bad
    )
    return list(rows)


def tables(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "zoo" / "rows").glob("*"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose rows were read and checked."""
    read: list[Path] = []
    batches = checked._batches
    monkeypatch.setattr(checked, "_batches", lambda path, *more: (read.append(path), batches(path, *more))[1])
    return read


def test_a_second_start_reads_no_row_and_has_the_same(folder: Path, reads: list[Path]) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    items = [
        dialogue("What is <b>?", "1", kind="text", weight=2.0),
        {**dialogue("<image>?", "2"), "images": ["a.png"]},
        {"question": "q", "answer": "3", "url": "u"},
    ]
    path = write_jsonl(folder / "rows.jsonl", items)
    for _ in range(2):
        rows = opened(path)
        assert rows == read_rows(path) and [row.skipped for row in rows] == [(), (), ("url",)]
    assert len(reads) == 1 and [file.suffix for file in tables(folder)] == [".arrow"]
    assert [row.kind for row in opened(path, kinds=["text"])] == ["text"] and len(reads) == 1
    assert opened(path, literal_tags=True)[0].messages and len(reads) == 2  # rows are read in another way


@pytest.mark.parametrize("suffix", [".json", ".csv", ".txt"])
def test_other_files_of_rows(folder: Path, suffix: str, reads: list[Path]) -> None:
    text = {
        ".json": json.dumps([dialogue("ä", "1"), dialogue("b", "2")]),
        ".csv": 'question,answer\n"two\nlines",1\nb,2\n',
        ".txt": "one\n\ntwo\n",
    }[suffix]
    path = folder / f"rows{suffix}"
    path.write_text(text)
    assert opened(str(path)) == opened(str(path)) == read_rows(path) and len(reads) == 1


def test_a_changed_file_is_read_anew(folder: Path, reads: list[Path]) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue("a", "1"), dialogue("b", "2")])
    opened(path)
    state = os.stat(path)
    for change in ({"answer": "3"}, {"answer": "4"}):  # of the same size, and with the times of the one before
        write_jsonl(folder / "rows.jsonl", [dialogue("a", "1"), dialogue("b", change["answer"])])
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert opened(path)[1].messages[1].content == change["answer"]
    assert len(reads) == 3


def test_a_file_whose_times_alone_have_changed_is_known(folder: Path, reads: list[Path]) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue("a", "1")])
    opened(path)
    os.utime(path, ns=(1, 1))
    assert opened(path) and len(reads) == 1


@pytest.mark.parametrize("left", [0, 10, 0.5, -1])
def test_a_cut_table_is_made_anew(folder: Path, left: float, reads: list[Path]) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue(str(number), "1") for number in range(100)])
    rows = opened(path)
    (table,) = tables(folder)
    whole = table.read_bytes()
    table.write_bytes(whole[: int(len(whole) * left) if left == 0.5 else left])
    assert opened(path) == rows and len(reads) == 2
    assert tables(folder)[0].read_bytes()[-6:] == b"ARROW1"
    assert opened(path) == rows and len(reads) == 2


def test_what_an_interrupted_process_has_left_is_no_table(folder: Path, reads: list[Path]) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue("a", "1"), {"messages": 3}])
    with pytest.raises(RowError, match=r"rows.jsonl:2"):
        opened(path)
    assert not tables(folder)
    bad: list[RowError] = []
    assert len(opened(path, bad.append)) == 1
    (table,) = tables(folder)
    table.rename(table.with_name(f"{table.name}.0123abcd.partial"))
    table.with_suffix(".lock").touch()
    assert len(opened(path, bad.append)) == 1 and len(reads) == 3
    assert len(opened(path, bad.append)) == 1 and len(reads) == 3
    assert [(error.source, error.cause) for error in bad] == [(f"{path}:2", "bad_row")] * 3


def test_a_cache_folder_that_takes_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue("a", "1")])
    (folder.parent / "cache").write_text("no folder")
    assert opened(path) == opened(path) and len(reads) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(folder.parent / "home"))
    assert opened(path) == opened(path) and len(reads) == 3


def test_tables_that_are_not_used_are_removed(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue("a", "1")])
    for days, left in ((0, 2), (store.UNUSED_DAYS + 1, 1)):
        opened(path)
        (table,) = tables(folder)
        os.utime(table, ns=(1, os.stat(path).st_mtime_ns - days * 86_400 * 10**9))
        opened(write_jsonl(folder / "others.jsonl", [dialogue("a", str(days))]))
        assert len(tables(folder)) == left
        for file in tables(folder):
            file.unlink()


def rank(path: str, log: Path, start: Any) -> None:
    checked.KEPT_MB = 0
    batches = checked._batches

    def counted(*arguments: Any) -> Any:
        with log.open("a") as file:
            file.write("read\n")
        return batches(*arguments)

    checked._batches = counted
    start.wait()
    rows = opened(path)
    with log.open("a") as file:
        file.write(f"{len(rows)} {identity.digests_of_rows('', rows).digests[0]}\n")


def test_one_of_several_ranks_reads(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue(str(number), "1") for number in range(2000)])
    context, log = multiprocessing.get_context("fork"), folder / "log"
    start = context.Barrier(3)
    ranks = [context.Process(target=rank, args=(path, log, start)) for _ in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    lines = log.read_text().splitlines()
    assert lines.count("read") == 1 and len(lines) == 4 and len(set(lines)) == 2


def test_a_bad_row_far_behind_is_named_by_its_line(folder: Path) -> None:
    path = folder / "rows.jsonl"
    good = json.dumps(dialogue("a", "1"))
    path.write_text(f"{good}\n" + "\n" * 899_998 + "{]\n" + f"{good}\n")
    for _ in range(2):
        bad: list[RowError] = []
        assert [row.source for row in opened(str(path), bad.append)] == [f"{path}:1", f"{path}:900001"]
        assert [(error.source, error.cause) for error in bad] == [(f"{path}:900000", "bad_json")]
    with pytest.raises(RowError, match=r"rows.jsonl:900000: broken JSON"):
        opened(str(path))


def test_a_file_that_is_missing_is_named_when_it_is_opened(
    folder: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_set, "LOOKED_AT", 2)
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    rows = [{**dialogue("<image>?", "2"), "images": [name]} for name in ("a.png", "gone.png", "a.png")]
    path = write_jsonl(folder / "rows.jsonl", rows)
    source = SampleSource.open([path], processor, DataConfig(workers=0), budget=512)
    (note,) = source.rows.notes()
    assert note.startswith(f"{path}: the files of 2 of 3 rows were looked for, all are there")
    assert source.measure(0) is not None
    for look in (source.measure, source.encode, source.sample):
        with pytest.raises(RowError, match=r"rows.jsonl:2: no file .*gone.png") as caught:
            look(1)
        assert caught.value.cause == "missing_file"
    rows[2]["images"] = ["lost.png"]
    with pytest.raises(RowError, match=r"rows.jsonl:3: no file .*lost.png"):
        SampleSource.open([write_jsonl(folder / "rows.jsonl", rows)], processor, DataConfig(), budget=512)


def test_digests_are_those_of_the_rows(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [dialogue(str(number), "1") for number in range(3000)])
    (part,) = open_rows([parse_entry({"path": path, "held_out": 0.3}, "")], DataConfig(), EVERY, fail).parts
    assert isinstance(part, identity.Digested) and 1800 < len(part) < 2400
    for index in (0, 1000, len(part) - 1):
        assert part.digests()[index].tobytes() == identity.row_digest(part[index])
    former = identity.digests_of_rows("rows", list(part))  # as checkpoints had them before
    assert not former.by_row and identity.difference(former, part) is None
    known = identity.digests_of_rows("rows", part)
    assert known.by_row and identity.difference(known, list(part)) is None
    other = [*list(part)[:1500], part[0], *list(part)[1501:]]
    assert "rows.jsonl:" in str(identity.difference(known, other))


def test_the_index_of_tars_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "KEPT_MB", 0)
    scanned: list[Path] = []
    samples_of = tars._samples_of
    monkeypatch.setattr(tars, "_samples_of", lambda file: (scanned.append(file), samples_of(file))[1])

    def answers() -> list[str]:
        rows = open_table(parse_entry(str(folder / "0.tar"), ""), Access, fail, evaluation=False, key="data.train")
        return [row.messages[1].content for row in rows]

    def write(*answers: str) -> None:
        write_tar(folder / "0.tar", {f"a/{n}\u00e9.json": dialogue("q", answer) for n, answer in enumerate(answers)})

    write("x", "y")
    for _ in range(2):
        assert answers() == ["x", "y"] and len(scanned) == 1
    write("x", "w")  # of the same size
    assert answers() == ["x", "w"] and len(scanned) == 2
    (table,) = tables(folder)
    table.write_bytes(table.read_bytes()[:-7])
    assert answers() == ["x", "w"] and len(scanned) == 3
    write("x", "w", "v")
    assert answers() == ["x", "w", "v"] and len(scanned) == 4


COLUMNS: dict[str, tuple[list[Any], Any]] = {
    "integers": ([3, -1, 2**40], pa.int64()),
    "small integers": ([0, 7, 255], pa.uint8()),
    "texts": (["é", None, ""], pa.string()),
    "bytes": ([b"\x00", b"", b"abc"], pa.large_binary()),
    "bytes of one length": ([b"ab", b"cd", b"ef"], pa.binary(2)),
    "lists": ([[b"a", b"bc"], None, []], pa.list_(pa.large_binary())),
    "empty lists": ([[], [], []], pa.list_(pa.large_binary())),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_batch_is_the_one_that_pyarrow_makes(name: str) -> None:
    values, kind = COLUMNS[name]
    batch = record_batch([values], pa.schema({"a": kind}))
    batch.validate(full=True)
    assert batch == pa.record_batch([values], schema=pa.schema({"a": kind}))
