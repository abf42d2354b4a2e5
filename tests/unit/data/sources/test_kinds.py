"""`kinds` of an entry: rows with that key `kind` alone, for training and for the held-out rows that follow from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from zoo.config.entries import parse_entry
from zoo.config.schema import DataConfig
from zoo.data.loading.defaults import with_defaults
from zoo.data.sources.row_set import RowSet, open_rows
from zoo.errors import UserError

MODALITIES = ("image", "video", "audio")


def opened(entry: Any, **options: Any) -> RowSet:
    return open_rows([parse_entry(entry, "data.train")], DataConfig(), MODALITIES, pytest.fail, **options)


def test_rows_of_two_kinds_of_the_bundled_set_and_their_held_out_rows() -> None:
    entry = {"path": "digits:train", "kinds": ["image", "audio"]}
    assert Counter(row.kind for row in opened(entry)) == {"image": 1110, "audio": 490}
    (held_out,) = with_defaults(DataConfig(train=[entry])).eval
    assert Counter(row.kind for row in opened(held_out, evaluation=True)) == {"image": 80, "audio": 60}


def test_rows_of_a_file_of_ones_own(tmp_path: Path) -> None:
    lines = [{"prompt": str(n), "completion": "x", "kind": "ab"[n % 2]} for n in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = opened({"path": str(path), "kinds": ["b"]})
    assert [row.messages[0][1] for row in rows] == ["1", "3", "5"]
    with pytest.raises(UserError, match="has no rows of kind c; their kinds: a, b"):
        opened({"path": str(path), "kinds": ["a", "c"]})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kinds": "image"}, "wanted a list of texts"),
        ({"kinds": []}, "wanted a list of kinds"),
        ({"kinds": [1]}, "wanted a list of kinds"),
        ({"kinds": ["a"], "stream": True}, "a stream gives all its rows"),
    ],
)
def test_kinds_that_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_entry({"path": "digits:train", **more}, "data.train")


def test_rows_that_are_read_when_their_turn_comes_are_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"prompt": "a", "completion": "b", "kind": "c"}]).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="kinds is for JSONL"):
        opened({"path": str(tmp_path / "x.parquet"), "kinds": ["c"]})
