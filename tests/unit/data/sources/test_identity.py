"""Rows are known by digests: what was changed is found and named, what was added is growth, where they lie is all one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.row_files import dialogue, write_jsonl, write_tar

from zoo.config.entries import DataEntry, parse_entry
from zoo.data.sources.identity import DIGESTS, difference, digests_of_rows
from zoo.data.sources.references import Access
from zoo.data.sources.streams import open_stream
from zoo.data.sources.tables import open_table

PIXEL = b"\x89PNG one"


def item(number: int) -> dict[str, Any]:
    return dialogue(f"What is {number}?", f"It is {number}.", weight=1.0)


def jsonl(folder: Path, items: list[dict[str, Any]]) -> str:
    return write_jsonl(folder / "rows.jsonl", items)


def parquet(folder: Path, items: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets")
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_list(items).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def saved(folder: Path, items: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(items).save_to_disk(folder / "saved")
    return str(folder / "saved")


def tar(folder: Path, items: list[dict[str, Any]]) -> str:
    return write_tar(folder / "rows.tar", {f"{number:05}.json": item for number, item in enumerate(items)})


KINDS = {"jsonl": jsonl, "parquet": parquet, "saved": saved, "tar": tar}
Write = Callable[[Path, list[dict[str, Any]]], str]


def fail(error: Exception) -> None:
    raise error


def opened(entry: Any) -> Any:
    return open_table(parse_entry(entry, ""), Access, fail, evaluation=False, key="data.train")


@pytest.mark.parametrize("write", KINDS.values(), ids=KINDS)
def test_what_changed_is_found_and_named(write: Write, tmp_path: Path) -> None:
    items = [item(number) for number in range(20)]
    known = digests_of_rows("rows", opened(write(tmp_path / "a", items)))
    assert difference(known, opened(write(tmp_path / "moved", items))) is None
    assert difference(known, opened(write(tmp_path / "grown", [*items, item(20)]))) is None
    for name, changed, row in (
        ("text", [*items[:7], item(99), *items[8:]], 8),
        ("order", [*items[:3], items[4], items[3], *items[5:]], 4),
        ("gone", [*items[:11], *items[12:]], 12),
        ("before", [item(20), *items], 1),
        ("weight", [*items[:5], {**items[5], "weight": 2.0}, *items[6:]], 6),
    ):
        why = difference(known, opened(write(tmp_path / name, changed)))
        assert why is not None and f":{row} is not the row that stood there" in why, (name, why)
    shorter = opened(write(tmp_path / "short", items[:19]))
    assert difference(known, shorter) == "19 rows are there, and 20 were"
    assert difference(known, shorter, fewer=True) is None


def test_every_row_of_a_large_file_counts(tmp_path: Path) -> None:
    count = 5 * DIGESTS + 3
    items = [item(number) for number in range(count)]
    known = digests_of_rows("rows", opened(jsonl(tmp_path / "a", items)))
    assert len(known.digests) == DIGESTS
    assert difference(known, opened(jsonl(tmp_path / "b", [*items, *items]))) is None
    for place in (0, 1, 1234, 2 * DIGESTS + 1, count - 1):
        why = difference(known, opened(jsonl(tmp_path / "c", [*items[:place], item(-1), *items[place + 1 :]])))
        assert why is not None and "rows.jsonl:" in why, place


def test_a_large_table_is_known_by_some_of_its_rows(tmp_path: Path) -> None:
    items = [item(number) for number in range(3 * DIGESTS)]
    known = digests_of_rows("rows", opened(parquet(tmp_path / "a", items)))
    assert known.spread and len(known.digests) == DIGESTS
    assert difference(known, opened(parquet(tmp_path / "b", [*items, item(-1)]))) is None
    assert difference(known, opened(parquet(tmp_path / "c", [item(-1), *items]))) is not None
    part = opened(parquet(tmp_path / "d", [*items, item(-1)]))
    assert difference(known, part[: len(part)]) is None  # rows that are held in a list are looked at alike


def test_media_files_by_name_and_what_comes_with_rows_by_content(tmp_path: Path) -> None:
    row = {**item(1), "images": ["one.png"]}
    row["messages"] = [{"role": "user", "content": "<image>?"}, row["messages"][1]]
    for folder in ("a", "b"):
        path = jsonl(tmp_path / folder, [row])
        (tmp_path / folder / "one.png").write_bytes(PIXEL)
    known = digests_of_rows("rows", opened(str(tmp_path / "a" / "rows.jsonl")))
    assert difference(known, opened(path)) is None
    (tmp_path / "b" / "two.png").write_bytes(PIXEL)
    assert difference(known, opened(jsonl(tmp_path / "b", [{**row, "images": ["two.png"]}]))) is not None
    away = str(tmp_path / "b" / "one.png")
    absolute = digests_of_rows("rows", opened(jsonl(tmp_path / "c", [{**row, "images": [away]}])))
    assert (
        difference(absolute, opened(jsonl(tmp_path / "d", [{**row, "images": [str(tmp_path / "a" / "one.png")]}])))
        is None
    )

    def rows(data: bytes) -> Any:
        return opened({"rows": [{**row, "images": [{"bytes": data, "path": None}]}]})

    known = digests_of_rows("rows", rows(PIXEL))
    assert difference(known, rows(PIXEL)) is None and difference(known, rows(PIXEL[:-1] + b"f")) is not None


def stream(path: str) -> Any:
    return open_stream(DataEntry(path=path, stream=True), Access, evaluation=False, key="data.train")


@pytest.mark.parametrize("count", [10, 300])
@pytest.mark.parametrize("write", [jsonl, parquet], ids=["jsonl", "parquet"])
def test_a_stream_is_known_by_its_first_rows_and_where_it_stands(count: int, write: Write, tmp_path: Path) -> None:
    items = [item(number) for number in range(count)]
    first = stream(write(tmp_path / "a", items))
    for place in range(210):
        first[place]
    first.forget(200)
    state = json.loads(json.dumps(first.state(200)))
    assert stream(write(tmp_path / "same", items)).difference(state) is None
    assert stream(write(tmp_path / "grown", [*items, item(-1)])).difference(state) is None
    why = stream(write(tmp_path / "b", [*items[:3], item(-1), *items[4:]])).difference(state)
    assert why is not None and ":4 is not the row that stood there" in why
    again = stream(write(tmp_path / "same2", items))
    assert again.difference(state) is None
    again.load(state)
    assert [again[200 + n].messages for n in range(9)] == [first[200 + n].messages for n in range(9)]
    if count == 300:  # behind the first rows, up to the place
        at = state[0]
        changed = [*items[:at], item(-1), *items[at + 1 :]]
        assert "where the checkpoint stands" in str(stream(write(tmp_path / "c", changed)).difference(state))
