"""Parquet files of any bytes, and of odd columns: rows, bad rows or a UserError, soon and within bounds of memory."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzzed, inside, mutated, read_as_rows, within

from zoo.config.entries import DataEntry
from zoo.data.sources.references import Access
from zoo.data.sources.tables import open_table
from zoo.errors import UserError

MEMORY_MB = 1024
TALK = [{"role": "user", "content": "Say 7."}, {"role": "assistant", "content": "7"}]
COLUMNS: dict[str, list[Any]] = {
    "messages": [[TALK, TALK], [[TALK[0]], None], ["x", None], [1, 2], [[[1], [2]], [[3]]], [{"role": "user"}, None]],
    "images": [
        [["a.png"], []],
        [["../secret.png"], None],
        [[b"\x89PNG"], [b""]],
        [[{"bytes": b"", "path": "../x"}], None],
        [[1.5], [2.5]],
    ],
    "text": [["words", None], [b"\xff\xfe", b""], ["\x00", "\u2028"], [True, False]],
    "conversations": [[[{"from": "human", "value": "?"}, {"from": "gpt", "value": "7"}], None]],
    "kind": [["a", "b" * 500], [1, None]],
    "weight": [[1.0, float("nan")], [2**62, -1], ["x", None]],
    "\ud7ff": [[1, 2]],
}


def parquet(columns: dict[str, list[Any]], **metadata: str) -> bytes:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata or None), file)
    return file.getvalue()


FEATURES = json.dumps(
    {"info": {"features": {"images": {"_type": "Image"}, "text": {"dtype": "string", "_type": "Value"}}}}
)
WHOLES = [
    parquet({"messages": [TALK, TALK], "kind": ["a", "b"]}),
    parquet({"text": ["words"] * 50}, huggingface=FEATURES),
    parquet({"messages": [TALK], "images": [[{"bytes": b"\x89PNG", "path": "../secret.png"}]]}),
]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets

    folder = tmp_path_factory.mktemp("parquet")
    (folder.parent / "secret.png").write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def check(folder: Path, data: bytes, form: str | None) -> None:
    path = folder / f"{next(NUMBERS)}.parquet"
    path.write_bytes(data)
    try:
        with within(20.0):
            entry = DataEntry(path=str(path), format=form)
            rows = open_table(
                entry, lambda root: Access(root, outside=False), print, evaluation=False, key="data.train"
            )
            for row in read_as_rows(rows, 20):
                for medium in (*row.images, *row.videos, *row.audios):
                    assert not isinstance(medium, str) or medium.startswith("data:") or inside(folder / medium, folder)
    except UserError as error:
        assert len(str(error)) < 3000
    finally:
        path.unlink()


@fuzzed(0.2)
@given(data=mutated(WHOLES))
def test_files_of_bytes(data: bytes, folder: Path) -> None:
    check(folder, data, None)


@fuzzed(0.2)
@given(names=st.lists(st.sampled_from([*COLUMNS]), min_size=1, max_size=3, unique=True), data=st.data(), form=st.sampled_from([None, None, "messages", "text", "captions"]))  # fmt: skip
def test_odd_columns(names: list[str], data: Any, form: str | None, folder: Path) -> None:
    columns = {name: data.draw(st.sampled_from(COLUMNS[name])) for name in names}
    huggingface = data.draw(
        st.sampled_from([None, FEATURES, "{", "[]", '{"info": {"features": {"text": {"_type": "os.system"}}}}'])
    )
    check(folder, parquet(columns, **({"huggingface": huggingface} if huggingface else {})), form)
