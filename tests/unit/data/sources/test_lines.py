"""CSV and plain text as rows, and `file://` as paths."""

import json
from pathlib import Path

import pytest
from PIL import Image

from zoo.config.entries import DataEntry
from zoo.config.schema import DataConfig
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import RowError, make_row, read_rows
from zoo.errors import UserError

PLAIN = (("user", "q"), ("assistant", "a"))


def test_csv(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    table = tmp_path / "x.csv"
    table.write_text('\ufeffquestion,answer,image,weight,id\nq,"one, ""two""\nthree",,0.5,1\n\nq,a,a.png,,2\n')
    first, second = read_rows(table)
    assert first.messages == (("user", "q"), ("assistant", 'one, "two"\nthree')) and first.weight == 0.5
    assert second.messages[0] == ("user", "<image>q") and second.source.endswith("x.csv:5")
    (tmp_path / "y.tsv").write_text(
        "messages\tid\n" + json.dumps([dict(role=r, content=c) for r, c in PLAIN]) + "\t1\n"
    )
    entry = DataEntry(path=str(tmp_path / "y.tsv"), format="messages")
    assert open_rows([entry], DataConfig(), ("text",), pytest.fail)[0].messages == PLAIN


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("q,a,b", "x.csv:3: 3 cells, but the first line names 2 columns"),
        ("q", "x.csv:3: 1 cells"),
        ('"q"b,a', "x.csv:3: no row of CSV: "),
        (",a", "unknown key 'answer'"),
    ],
)
def test_bad_rows_of_csv(line: str, words: str, tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    table.write_text(f"question,answer\nq,a\n{line}\nq,a\n")
    bad: list[RowError] = []
    assert len(read_rows(table, bad.append)) == 2
    assert words in str(bad[0]) and len(bad) == 1


def test_files_that_are_no_csv(tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    for content, words in (
        (b"q,q\n", "column 'q' twice"),
        (b"question,answer\nq,\xe9\n", "not UTF-8"),
        (b"", "no rows"),
    ):
        table.write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_rows(table)
    table.write_bytes(b"question,answer\nq,a\n")
    with pytest.raises(UserError, match=r"a \.csv file is read whole"):
        open_rows([DataEntry(path=str(table), stream=True)], DataConfig(), ("text",), pytest.fail)


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("Once.\n\nTwice é.\r\n".encode() + b"\xff\n")
    bad: list[RowError] = []
    rows = read_rows(tmp_path / "x.txt", bad.append)
    assert [row.text for row in rows] == ["Once.", "Twice é."]
    assert "x.txt:4: not UTF-8 at byte 0" in str(bad[0])


def test_file_uris_are_paths_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for place in (tmp_path / "root" / "a b.png", tmp_path / "above.png"):
        Image.new("RGB", (4, 4)).save(place)

    def image(uri: str) -> str:
        messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
        row = make_row({"messages": messages, "images": [uri]}, "x:1", Access(tmp_path / "root", outside=False))
        (found,) = row.images
        assert isinstance(found, str) and (row.root / found).is_file()
        return found

    path = str(tmp_path / "root" / "a b.png")
    assert image(f"file://{path}") == image(f"file://localhost{path}") == path
    assert image(f"file://{path.replace(' ', '%20')}") == path
    assert image("file://a b.png") == "a b.png"
    for uri in (f"file://{tmp_path}/above.png", "file://../above.png", "file:///etc/passwd", "file://%2e%2e/above.png"):
        with pytest.raises(RowError) as caught:
            image(uri)
        assert caught.value.cause == "outside_root"
