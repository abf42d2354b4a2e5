"""Time of reading what strangers have written: large rows, files and settings of whatever kind are read or refused in seconds.

Process time is measured, at sizes of which work that grows with their square takes at least twice the limit. Linear work
takes a fourth of it at most, so that a busy machine passes too.
"""

import io
import json
import struct
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from zoo.bridge.files.headers import read_header, read_index
from zoo.config.architecture import check_arch
from zoo.config.entries import DataEntry
from zoo.config.layers.reader import read_yaml
from zoo.config.locate import check_side_files, read_arch
from zoo.data.processors import plain_turns
from zoo.data.processors.answers import AnswerFinder
from zoo.data.processors.boxes import THOUSANDTHS, with_boxes
from zoo.data.processors.chat import check_written, with_thoughts
from zoo.data.processors.labels import Span, answer_begins, text_begins
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.lines import numbered_items
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Box, Row, parse_row
from zoo.data.sources.tables import open_table
from zoo.errors import UserError

LIMIT = 4.0  # seconds of the process
LETTERS, ITEMS = 256_000, 32_000  # of one text; of what is made of several characters or objects
TEXTS = ["<", " ", "\n", "<image>", "<think>", "</think>", "<think>\n", "<bbox>", "é", "\ufdd0", "{", "[", '\\"', "<|im_start|>", "a "]  # fmt: skip


def assert_soon(made: Callable[[int], Callable[[], object]], size: int) -> None:
    """That the work made for a size is done within the limit; smaller sizes come first, so that bad ones end soon."""
    for part in (16, 4, 1):
        work = made(size // part)
        begin = time.process_time()
        with suppress(UserError, ValueError):
            work()
        took = time.process_time() - begin
        assert took < LIMIT, f"{took:.1f} s for {size // part}"


def say(content: Any, role: str = "user", **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


def call(number: int) -> dict[str, Any]:
    return {"function": {"name": f"call_{number}", "arguments": "{}"}}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{f"text of {text!r}": lambda n, t=text: {"messages": [say(t * n), say(t * n, "assistant")]} for text in TEXTS},
    "plain text": lambda n: {"text": "words " * n},
    "keys": lambda n: {f"key {i}": 1 for i in range(n)},
    "one key": lambda n: {"k" * n: 1},
    "turns": lambda n: {"messages": [say("q" * (n // 2000), ("user", "assistant")[i % 2]) for i in range(4000)]},
    "turns of the assistant": lambda n: {"messages": [say("q"), *(say("a" * (n // 4000), "assistant") for _ in range(4000))]},
    "turns of calls": lambda n: {"messages": [say("q"), *(say("", "assistant", tool_calls=[call(k) for k in range(n // 2000)]) for _ in range(2000))]},
    "more turns than there may be": lambda n: {"messages": [say("q")] * n},
    "calls": lambda n: {"messages": [say("q"), say("", "assistant", tool_calls=[call(i) for i in range(n)])]},
    "tools": lambda n: {"messages": [say("q"), say("a", "assistant")], "tools": [{"name": f"tool {i}"} for i in range(n)]},
    "tools as JSON": lambda n: {"messages": [say("q"), say("a", "assistant")], "tools": json.dumps([{"name": f"t{i}"} for i in range(n)])},
    "reasoning": lambda n: {"messages": [say("q"), say("\n" * n, "assistant", reasoning_content="\n" * n)]},
    "parts of text": lambda n: {"messages": [say([{"type": "text", "text": "<image>"}] * n), say("a", "assistant")]},
    "parts of images": lambda n: {"messages": [say([{"type": "image"}] * n), say("a", "assistant")], "images": ["a.png"] * n},
    "images": lambda n: {"messages": [say("<image>" * n), say("a", "assistant")], "images": ["a.png"] * n},
    "boxes": lambda n: {"messages": [say("<bbox><ref-object>" * n), say("a", "assistant")], "objects": {"ref": ["x"] * n, "bbox": [[1, 2]] * n, "bbox_type": "norm1"}},
    "conversations": lambda n: {"conversations": [{"from": "human", "value": "<image>" * n}, {"from": "gpt", "value": "a"}]},
    "pairs": lambda n: {"conversations": [{"human": "q" * (n // 2000), "assistant": "a"}] * 2000},
    "history": lambda n: {"query": "q", "response": "a", "history": [["q", "a"]] * n},
    "answers": lambda n: {"question": "q", "answers": [f"a{i}" for i in range(n)]},
    "preference": lambda n: {"prompt": "q" * n, "chosen": " " * n + "a", "rejected": "b" * n},
    "cauldron": lambda n: {"images": [], "texts": [{"user": "q", "assistant": "a"}] * n},
    "alpaca": lambda n: {"instruction": "\n" * n, "input": "\n" * n, "output": "a"},
    "receipt": lambda n: {"image": "a.png", "ground_truth": json.dumps({"gt_parse": ["1"] * n})},
    "lists within lists": lambda n: {"messages": [say([[[[]] * n]])]},
}  # fmt: skip
FORMS = {"receipt": "cord_v2", "lists within lists": None}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, tmp_path: Path) -> None:
    """JSON to a checked row, tags as media and as text."""

    def made(size: int) -> Callable[[], object]:
        line = json.dumps(ROWS[name](size)).encode()
        forms = [Form(FORMS.get(name)), Form(FORMS.get(name), literal_tags=True)]

        def read() -> None:
            for form in forms:
                with suppress(UserError):
                    parse_row(line, "x", Access(tmp_path), form)

        return read

    assert_soon(made, LETTERS if name.startswith("text of") else ITEMS)


def lines_of(kind: str, n: int) -> bytes:
    row = json.dumps({"text": "x"}).encode()
    texts = {
        "lines.jsonl": (row + b"\n") * n,
        "long.jsonl": b'{"text": "' + b"\\u00e9" * n + b'"}',
        "blank.jsonl": b" " * n + b"\n" * n + row,
        "list.json": b"[" + b",".join([row] * n) + b"]",
        "open.json": b"[" + b"[1,\n" * min(n, 900) + b"1,\n" * n,
        "columns.csv": ",".join(f"c{i}" for i in range(n)).encode() + b"\n" + b"1," * (n - 1) + b"1\n",
        "same.csv": b"c," * n,
        "rows.csv": b"text,kind\n" + b'"a ""b""",k\n' * n,
        "lines.csv": b'text,kind\n"' + b"\n" * n + b'",k\n',
        "quote.csv": b'text,kind\n"' + b'""\n' * n,
        "returns.csv": b"text,kind\r" + b"a,k\r" * n,
        "wide.tsv": b"text\tkind\n" + b"\t" * n + b"\n" + b"a\tk\n" * n,
        "lines.txt": b"words\n" * n,
        "long.txt": b"\xc3\xa9" * n,
    }
    return texts[kind]


@pytest.mark.parametrize("kind", ["lines.jsonl", "long.jsonl", "blank.jsonl", "list.json", "open.json", "columns.csv", "same.csv", "rows.csv", "lines.csv", "quote.csv", "returns.csv", "wide.tsv", "lines.txt", "long.txt"])  # fmt: skip
def test_files_of_rows(kind: str, tmp_path: Path) -> None:
    def made(size: int) -> Callable[[], object]:
        path = tmp_path / f"{size}_{kind}"
        path.write_bytes(lines_of(kind, size))
        return lambda: [None for _ in numbered_items(path, path.name)]

    assert_soon(made, LETTERS)


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_parquet(kind: str, tmp_path: Path) -> None:
    def made(size: int) -> Callable[[], object]:
        path = tmp_path / f"{size}.parquet"
        columns = {"text": ["x"] * size} if kind == "rows" else {f"c{i}": ["x"] for i in range(size)}
        pq.write_table(pa.table(columns), path)

        def read() -> None:
            rows = open_table(DataEntry(path=str(path)), Access, lambda error: None, evaluation=False, key="data.train")
            for place in range(0, len(rows), max(1, len(rows) // 50)):
                with suppress(UserError):
                    rows[place]

        return read

    assert_soon(made, ITEMS if kind == "rows" else 2000)


@pytest.mark.parametrize("kind", ["samples", "members", "links"])
def test_tars(kind: str, tmp_path: Path) -> None:
    def made(size: int) -> Callable[[], object]:
        path = tmp_path / f"{size}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(size):
                info = tarfile.TarInfo(f"{number}.json" if kind == "samples" else f"0.{number}.png")
                info.type, info.size = (tarfile.LNKTYPE, 0) if kind == "links" else (tarfile.REGTYPE, 2)
                tar.addfile(info, io.BytesIO(b"{}"))

        def read() -> None:
            rows = open_table(DataEntry(path=str(path)), Access, lambda error: None, evaluation=False, key="data.train")
            for place in range(min(len(rows), 50)):
                with suppress(UserError):
                    rows[place]

        return read

    assert_soon(made, 8000)


def tools_row(n: int) -> Row:
    tools = json.dumps([{"type": "function", "function": {"name": f"tool {i}"}} for i in range(n)])
    calls = json.dumps([{"name": f"tool {i}", "arguments": {}} for i in range(n)])
    said = (("system", "s"), ("user", "<image>q" * n), ("assistant", ""), ("tool", "<image>r" * n), ("assistant", "a"))
    return Row(said, tools=tools, calls=("", "", calls, "", ""))


def written(row: Row) -> str:
    return row.tools + "".join(content + called for (_, content), called in zip(row.messages, row.calls, strict=True))


def chat(n: int) -> list[dict[str, Any]]:
    return [say(f"turn {i}", ("user", "assistant")[i % 2]) for i in range(n)]


def roles(messages: Any, add_generation_prompt: bool = False) -> str:
    text = "".join(f"{message['role'].upper()}: {message['content']} " for message in messages)
    return text + ("ASSISTANT:" if add_generation_prompt else "")


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str, return_offsets_mapping: bool) -> dict[str, Any]:
        return {"input_ids": [ord(letter) for letter in text], "offset_mapping": [(n, n + 1) for n in range(len(text))]}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, ids))


def spans_of(n: int) -> Callable[[], object]:
    text = "USER: q ASSISTANT: a" * n
    answers = [Span(20 * i + 18, 20 * i + 20) for i in range(n)]
    ids = torch.tensor([ord(letter) for letter in text])
    return lambda: plain_turns.spans(Letters(), text, answers, ids, ())


def first_tokens(n: int) -> Callable[[], object]:
    finder = AnswerFinder.__new__(AnswerFinder)
    finder.tokenizer = Letters()
    return lambda: finder._tokens_of([ord("\n")] * n, n - 1)


def boxes_of(n: int) -> Callable[[], object]:
    row = Row((("user", "<bbox>" * n), ("assistant", "a")), boxes=(Box(0, (1.0, 2.0)),) * n)
    return lambda: with_boxes(row, THOUSANDTHS, [(10, 10)], lambda: ())


PROCESSING: dict[str, Callable[[int], Callable[[], object]]] = {
    **{f"thoughts in {t!r}": lambda n, t=t: lambda: with_thoughts([say(t * n, "assistant"), say("</think>", "assistant")]) for t in TEXTS},
    "thoughts behind white space": lambda n: lambda: with_thoughts([say("\n" * n + "x" + "\n" * n, "assistant")]),
    **{f"answer of {t!r}": lambda n, t=t: lambda: answer_begins(f"x{t * n}", t * n) for t in TEXTS},
    **{f"answer without {t!r}": lambda n, t=t: lambda: answer_begins(t * n, f"{t * n}x") for t in TEXTS},
    **{f"call behind {t!r}": lambda n, t=t: lambda: text_begins(t * n, f"{t * n}x") for t in TEXTS},
    "tools and texts": lambda n: lambda: check_written(tools_row(n), written(tools_row(n))),
    "turns of plain text": lambda n: lambda: plain_turns.write(roles, chat(n), "</s>"),
    "spans": spans_of,
    "first tokens": first_tokens,
    "boxes": boxes_of,
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSING)
def test_what_a_processor_does_with_a_row(name: str) -> None:
    assert_soon(PROCESSING[name], LETTERS if "'" in name else ITEMS)


def settings_of(kind: str, n: int) -> Any:
    deep: Any = 1
    for _ in range(min(n, 900)):
        deep = {"a": deep}
    return {
        "keys": {f"key{i}": i for i in range(n)},
        "list": {"a": list(range(n))},
        "deep": {"a": [deep] * 3},
        "text": {"a": "\\" * n},
    }[kind]


@pytest.mark.parametrize("kind", ["keys", "list", "deep", "text"])
def test_settings_of_a_model(kind: str, tmp_path: Path) -> None:
    def made(size: int) -> Callable[[], object]:
        folder = tmp_path / str(size)
        folder.mkdir()
        value = settings_of(kind, size)
        for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
            (folder / name).write_text(json.dumps(value))

        def read() -> None:
            for work in (lambda: read_arch(folder), lambda: check_side_files(folder), lambda: check_arch(value, "x")):
                with suppress(UserError):
                    work()

        return read

    assert_soon(made, ITEMS)


@pytest.mark.parametrize("kind", ["tensors", "shape", "index"])
def test_headers(kind: str, tmp_path: Path) -> None:
    def made(size: int) -> Callable[[], object]:
        path = tmp_path / f"{size}.safetensors"
        if kind == "index":
            path.write_text(json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(size)}}))
            return lambda: read_index(path)
        shape = [1] * size if kind == "shape" else [1]
        count = 1 if kind == "shape" else size
        entries = {f"t{i}": {"dtype": "U8", "shape": shape, "data_offsets": [i, i + 1]} for i in range(count)}
        header = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(count))
        return lambda: read_header(path)

    assert_soon(made, ITEMS)


YAML: dict[str, Callable[[int], str]] = {
    "keys": lambda n: "".join(f"key{i}: {i}\n" for i in range(n)),
    "one line": lambda n: "{" + ", ".join(f"key{i}: {i}" for i in range(n)) + "}",
    "aliases": lambda n: "a: &a [1]\nb: [" + "*a, " * n + "]",
    "anchors": lambda n: "".join(f"- &a{i} 1\n" for i in range(n)),
    "merges": lambda n: "a: &a {x: 1}\nb:\n" + "".join(f"  k{i}: {{<<: *a}}\n" for i in range(n)),
    "brackets": lambda n: "[" * n,
    "digits": lambda n: "1" * n * 10,
    "words": lambda n: "a " * n * 10,
    "lines": lambda n: "|\n" + " a\n" * n * 10,
    "quotes": lambda n: '"' + "\\n" * n * 10 + '"',
    "comments": lambda n: "#\n" * n * 10,
}


@pytest.mark.parametrize("kind", YAML)
def test_recipes(kind: str) -> None:
    assert_soon(lambda size: partial(read_yaml, YAML[kind](size)), ITEMS)


def test_a_chat_of_plain_text_with_too_many_turns_is_refused() -> None:
    """Its answers are found one by one, each in what the template writes up to it."""
    with pytest.raises(ValueError, match="2000 answers in a chat of this length are too many"):
        plain_turns.write(roles, chat(4000), "</s>")
    text, spans = plain_turns.write(roles, chat(400), "</s>")
    assert [text[start:end] for start, end in spans] == [f" turn {i}</s>" for i in range(1, 400, 2)]


def test_tools_in_another_order_are_found_or_refused_soon() -> None:
    row = tools_row(300)
    check_written(row, written(row) + row.tools)
    check_written(row, "s" + "q" * 300 + " ".join(f"tool {i}" for i in reversed(range(300))) + "r" * 600)
    many = tools_row(20_000)
    begin = time.process_time()
    with pytest.raises(UserError, match="writes tools in another order than the row"):
        check_written(many, "s" + "q" * 20_000 + " ".join(f"tool {i}" for i in reversed(range(20_000))))
    assert time.process_time() - begin < 2


def test_a_line_of_csv_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for a line of one long cell and for one of many cells; rows behind it are read."""
    monkeypatch.setattr("zoo.data.sources.lines.LINE_MB", 1)
    table = tmp_path / "x.csv"
    for long in ("a," * 2**20, '"' + "\n" * 2**21 + '"', '"' + "a" * 2**21 + '"', "a" * 2**21):
        table.write_text(f"text,kind\n{long}\nwords,k\n")
        rows = list(numbered_items(table, "x.csv"))
        assert "over 1 MiB" in str(rows[0][1]), rows[0]
        if not long.startswith('"'):  # else its end opens another cell
            assert rows[1] == (3, {"text": "words", "kind": "k"})
    table.write_text("a," * 2**20)
    with pytest.raises(UserError, match=r"x\.csv:1: no names of columns: it is over 1 MiB"):
        list(numbered_items(table, "x.csv"))
