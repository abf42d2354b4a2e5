"""Rows of any kind: each is a row or a RowError of one printable line, soon, and names no file outside of the data root."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzzed, inside, memory_below, mutated, within

from zoo.data.errors import RowError
from zoo.data.sources.formats.choose import FORMATS
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row, parse_row

MEMORY_MB = 1024
SAY = {"role": "user", "content": "Say 7."}
ANSWER = {"role": "assistant", "content": "7"}
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)

GOOD: list[dict[str, Any]] = [
    {"messages": [SAY, ANSWER], "kind": "x", "weight": 0.5},
    {"messages": [{"role": "user", "content": "<image><audio>"}, ANSWER], "images": ["a.png"], "audio": "b.wav"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PNG}}]}, ANSWER]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, {"type": "image"}]}, ANSWER], "images": ["a.png"]},
    {"id": "1", "image": "a.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "7"}]},
    {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "<video>"}, {"from": "gpt", "value": "7", "weight": 2}], "video": "a.mp4"},
    {"text": "Plain text.", "kind": "t", "weight": 1},
    {"image": "a.png", "ground_truth": '{"gt_parse": {"total": "7"}}'},
    {"image": "a.png", "caption": "red"},
    {"instruction": "Add.", "input": "1", "output": "2", "history": [["a", "b"]], "system": "s"},
    {"query": "<image>", "response": "7", "images": ["a.png"]},
    {"prompt": [SAY], "completion": [ANSWER]},
    {"question": "q", "answers": ["7", "8"], "image": "file://a.png"},
    {"prompt": "q", "chosen": "7", "rejected": "8"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}, {"from": "observation", "value": "x"}], "chosen": {"from": "gpt", "value": "7"}, "rejected": {}},
    {"images": ["a.png"], "texts": [{"user": "q", "assistant": "7", "source": "x"}]},
    {"messages": [SAY, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}, {"role": "tool", "content": "1"}, ANSWER], "tools": '[{"name": "f"}]'},
    {"messages": [{"role": "user", "content": "<image><ref-object>"}, {"role": "assistant", "content": "<bbox>"}], "images": ["a.png"], "objects": {"ref": ["x"], "bbox": [[1, 2, 3, 4]], "bbox_type": "real", "image_id": [0]}},
]  # fmt: skip
WORDS = [
    "", "7", "a.png", "b.wav", "../secret.png", "above.png", "up/secret.png", "/etc/passwd", "/dev/zero", "/proc/self/mem", "file:///etc/passwd",
    "a.png\0", "http://127.0.0.1:1/x", "HTTPS://x", "data:", "data:,", "data:image/png;base64,", PNG, "x" * 5000, "é" * 300, "\ud800", "\udc80.png",
    "\x1b[2J", "\n", "\r\n", "\u2028", "<image>", "<video><audio>", "<|im_end|>", "<|image_pad|>", "${oc.env:HOME}", "{{ 7 * 7 }}", "user", "assistant",
    "system", "human", "gpt", "tool", "function_call", "tool_call", "<bbox>", "<ref-object>", "norm1", '{"name": "f"}', "file://above.png", "file:///etc/passwd", "text", "image", "image_url", "input_audio", '{"gt_parse": ' + "[" * 3000, "[" * 5000, '{"gt_parse": 1' + "0" * 5000 + "}",
]  # fmt: skip
KEYS = [
    "messages", "conversations", "text", "images", "image", "videos", "video", "audios", "audio", "kind", "weight", "use_audio_in_video", "role",
    "content", "from", "value", "type", "url", "path", "bytes", "array", "sampling_rate", "data", "format", "image_url", "input_audio", "ground_truth",
    "caption", "txt", "id", "system", "instruction", "input", "output", "history", "query", "response", "prompt", "completion", "question",
    "answer", "answers", "chosen", "rejected", "rejected_response", "texts", "tools", "tool_calls", "function_call", "function", "name",
    "arguments", "objects", "ref", "bbox", "bbox_type", "image_id", "loss", "conversation",
]  # fmt: skip

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**4000, -(10**400), 2**63, 0]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=12),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.sampled_from(WORDS)), inner, max_size=4),
    ),
    max_leaves=12,
)


@st.composite
def changed(draw: Any) -> dict[str, Any]:
    """A good row with some values, at any depth, replaced."""
    row: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    for _ in range(draw(st.integers(1, 4))):
        place: Any = row
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                place = inner
                continue
            how = draw(st.integers(0, 3))
            if how == 0:
                del place[key]
            elif how == 1 and isinstance(place, dict):
                place[draw(st.sampled_from(KEYS))] = draw(values)
            else:
                place[key] = draw(values)
            break
    return row


def check(make: Any, root: Path, processor: Any = None) -> None:
    """That a row is made, and encoded, or refused in one printable line."""
    try:
        with within():
            row: Row = make()
            for medium in (*row.images, *row.videos, *row.audios):
                if isinstance(medium, str) and not medium.startswith("data:"):
                    assert inside(root / medium, root), medium
            for text in (row.kind or "", row.text or "", row.tools, *row.calls, *(said for _, said in row.messages)):
                text.encode()
            if processor is not None:
                processor.measure(row, video_fps=1.0, max_frames=4)
                processor.encode(row, video_fps=1.0, max_frames=4)
    except RowError as error:
        assert str(error).isprintable() and len(str(error)) <= 1200, str(error)[:2000]
        str(error).encode()


@pytest.fixture(scope="module", autouse=True)
def bounded(processor: Any) -> Any:
    with memory_below(MEMORY_MB):
        yield


@fuzzed()
@given(line=mutated([json.dumps(row).encode() for row in GOOD]))
def test_lines_of_bytes(line: bytes, root: Path) -> None:
    check(lambda: parse_row(line, "x:1", Access(root, outside=False)), root)


@fuzzed()
@given(item=changed() | st.dictionaries(st.sampled_from(KEYS), values), form=st.sampled_from([None, None, *FORMATS]))
def test_rows_of_any_format(item: dict[str, Any], form: str | None, root: Path) -> None:
    """JSONL, ShareGPT, OpenAI's parts, and the sets with adapters."""
    check(lambda: make_row(item, "x:1", Access(root, outside=False), form), root)


@fuzzed()
@given(item=changed())
def test_rows_up_to_the_sample(item: dict[str, Any], root: Path, processor: Any) -> None:
    check(lambda: make_row(item, "x:1", Access(root, outside=False)), root, processor)
