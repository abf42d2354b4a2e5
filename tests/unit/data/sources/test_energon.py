"""Tars as Megatron-Energon prepares them: what `.nv-meta` says is read, and none of its code is run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.row_files import png, write_tar

from zoo.config.entries import DataEntry
from zoo.config.schema import DataConfig
from zoo.data.sources.row_set import RowSet, open_rows
from zoo.data.sources.rows import RowError
from zoo.data.sources.tables import check_entry
from zoo.errors import UserError

TURNS = [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]


def prepared(folder: Path, kind: str | None, fields: dict[str, str] | None, **split: Any) -> Path:
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"sample_type": {"__module__": "megatron.energon", "__class__": kind}}
    about |= {"field_map": fields} if fields is not None else {"sample_loader": "sample_loader.py:load"}
    (meta / "dataset.yaml").write_text(yaml.safe_dump(about))
    parts = split or {"train": ["shards/{0..1}.tar"], "val": ["shards/2.tar"], "test": []}
    (meta / "split.yaml").write_text(yaml.safe_dump({"exclude": [], "split_parts": parts}))
    (meta / "sample_loader.py").write_text("raise SystemExit('run')")
    return folder


def rows(folder: Path, **entry: Any) -> RowSet:
    found = DataEntry(path=str(folder), **entry)
    check_entry(found, "data.train")
    return open_rows([found], DataConfig(), ("text", "image"), pytest.fail)


def vqa(folder: Path) -> None:
    for number in range(3):
        item = [{"value": f"q{number}"}, {"value": [f"a{number}"]}]
        write_tar(folder / f"shards/{number}.tar", {"0.png": png(), "0.json": item, "1.png": png(), "1.json": item})


def test_visual_question_answering(tmp_path: Path) -> None:
    vqa(tmp_path)
    fields = {"image": "jpg;png", "context": "json[0][value]", "answers": "json[1][value]"}
    found = rows(prepared(tmp_path, "VQASample", fields))
    assert [row.messages[0].content for row in found] == ["<image>q0"] * 2 + ["<image>q1"] * 2
    assert found[3].messages[1] == ("assistant", "a1") and len(found[3].images) == 1
    assert [row.messages[1].content for row in rows(tmp_path, split="val")] == ["a2", "a2"]
    about = yaml.safe_load((tmp_path / ".nv-meta/split.yaml").read_text())
    (tmp_path / ".nv-meta/split.yaml").write_text(
        yaml.safe_dump({**about, "exclude": ["shards/0.tar", "shards/1.tar/1"]})
    )
    assert len(rows(tmp_path)) == 1
    with pytest.raises(UserError, match=r"no tars of a split test in .nv-meta/split.yaml; splits: train, val"):
        rows(tmp_path, split="test")


def test_captions_and_chatml(tmp_path: Path) -> None:
    write_tar(tmp_path / "c/x.tar", {"0.png": png(), "0.txt": b"red"})
    fields = {"image": "png", "caption": "txt"}
    (row,) = rows(prepared(tmp_path / "c", "CaptioningSample", fields, train=["x.tar"]))
    assert row.messages[1] == ("assistant", "red")
    write_tar(
        tmp_path / "m/x.tar", {"0.png": png(), "0.json": TURNS, "1.json": [{**one, "value": "q"} for one in TURNS]}
    )
    fields = {"imgs": "png", "conversation": "json"}
    first, second = rows(prepared(tmp_path / "m", "ChatMLSample", fields, train=["x.tar"]))
    assert (len(first.images), len(second.images), first.messages[0].content) == (1, 0, "<image>q")


def test_a_json_that_is_a_list_is_a_conversation(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.png": png(), "0.json": TURNS})
    (row,) = rows(tmp_path / "x.tar")
    assert row.messages == (("user", "<image>q"), ("assistant", "a")) and len(row.images) == 1


@pytest.mark.parametrize(
    ("fields", "members", "words"),
    [
        ({"imgs": "jpgs", "conversation": "json"}, {"0.jpgs": b"\x80\x04]", "0.json": TURNS}, "a pickle, say, which is never read"),
        ({"imgs": "png", "conversation": "json[5]"}, {"0.json": TURNS}, "nothing at json[5], where dataset.yaml's field_map looks"),
        ({"imgs": "png", "conversation": "json[a][b]"}, {"0.json": 3}, "nothing at json[a][b]"),
        ({"imgs": "png", "conversation": "txt"}, {"0.json": TURNS}, "'conversations' is missing"),
        ({"imgs": "png", "conversation": "json"}, {"0.json": b"[1,"}, "broken JSON"),
    ],
)  # fmt: skip
def test_bad_samples(fields: dict[str, str], members: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(RowError) as caught:
        rows(prepared(tmp_path, "ChatMLSample", fields, train=["x.tar"]))[0]
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_code_and_foreign_files_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.json": TURNS})
    with pytest.raises(UserError, match="a sample_loader, which is code that zoo does not run; name how"):
        rows(prepared(tmp_path, "VQASample", None, train=["x.tar"]))
    with pytest.raises(UserError, match="the class Similarity"):
        rows(prepared(tmp_path, "Similarity", {"a": "b"}, train=["x.tar"]))
    write_tar(tmp_path / "above.tar", {"0.json": TURNS})
    inner = prepared(tmp_path / "inner", "VQASample", {"context": "json"}, train=["../above.tar"])
    with pytest.raises(UserError, match="which is no file of that folder"):
        rows(inner)
    (inner / ".nv-meta/split.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(UserError, match=r"split.yaml can't be read"):
        rows(inner)
