"""Every key of a row and of a message, in every format: it changes the sample, or the row is refused by its name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from support.every_processor import build

from zoo.config.entries import FORMS, parse_entry
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.processors.processor import Processor
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.formats.labelled_media import CLASSES, LABELLED
from zoo.data.sources.formats.published_sets import SET_FORMATS
from zoo.data.sources.formats.row_keys import (
    COMMON,
    FOREIGN,
    IMAGES,
    MEDIA,
    QUALIFYING,
    REJECTED,
    REJECTED_OWN,
    ROW_KEYS,
    SOUNDS,
)
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import Row, make_row

HOW: dict[str, Any] = {"video_fps": 2.0, "max_frames": 4}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OTHER = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RECEIPT = '{"gt_parse": {"total": "%s"}}'
# Rows of each format, whose keys together are all that it has.
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": TURNS}],
    "conversations": [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, {"conversation": [{"human": "q", "assistant": "a"}]}],
    "text": [{"text": "q"}],
    "alpaca": [{"instruction": "q", "output": "a"}, {"instruction": "q", "input": "i", "output": "a", "history": [["h", "i"]]}],
    "query_response": [{"query": "q", "response": "a"}],
    "prompt_completion": [{"prompt": "q", "completion": "a"}, {"prompt": TURNS[:1], "completion": TURNS[1:]}],
    "question_answer": [{"question": "q", "answer": "a"}, {"question": "q", "answers": ["a", "a", "b"]}, {"question": "q", "answer": "a", "answers": ["a", "b"]}],
    "preference": [
        {"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": TURNS, "rejected": OTHER}, {"prompt": "q", "chosen": TURNS, "rejected": [TURNS[0], OTHER[1]]},
        {"messages": TURNS, "rejected_response": "b"}, {"conversations": TURNS, "rejected_messages": OTHER}, {"question": "q", "answer": "a", "rejected_response": "b"},
        {"instruction": "q", "input": "i", "output": "a", "rejected_response": "b"}, {"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"},
        {"query": "q", "response": "a", "history": [["h", "i"]], "rejected_response": "b"}, {"question": "q", "history": [["h", "i"]], "chosen": "a", "rejected": "b"},
        {"prompt": "q", "completion": "a", "rejected_response": "b"}, {"context": "q", "chosen": "a", "rejected": "b"}, {"conversations": TURNS[:1], "chosen": "a", "rejected": "b"},
    ],
    "retrieval": [{"query": "q", "positive": "a"}, {"query": "q", "positive": "a", "negatives": ["n"], "instruction": "i"}],
    "cauldron": [{"images": ["a.png"], "texts": [{"user": "q", "assistant": "a", "source": "s"}]}],
    "cord_v2": [{"image": "a.png", "ground_truth": RECEIPT % 1}],
    "llava_instruct": [{"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}],
    "captions": [{"image": "a.png", "caption": "a"}, {"images": ["a.png"], "text": "a"}, {"file_name": "a.png", "txt": "a"}],
    "transcripts": [{"audio": "a.wav", "sentence": "a"}, {"file_name": "a.wav", "transcription": "a"}],
    "classes": [{"image": "a.png", "label": "a"}, {"audio": "a.wav", "label_name": "a"}, {"img": "a.png", "labels": ["a"]}],
}  # fmt: skip
VALUES: dict[str, Any] = {
    "image": "b.png", "images": ["b.png"], "video": "v.mp4", "videos": ["v.mp4"], "audio": "b.wav", "audios": ["b.wav"],
    "kind": "k", "task": "vqa", "answers": ["c", "d"], "weight": 0.5, "label": True, "use_audio_in_video": True, "tools": [TOOL],
    "objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}, "extra": {"unit": "kg"}, "system": "s", "history": [["j", "k"]],
    "chosen": OTHER, "messages": OTHER, "conversations": OTHER, "conversation": OTHER, "texts": [{"user": "r", "assistant": "b"}], "ground_truth": RECEIPT % 2,
    **dict.fromkeys(SOUNDS[2:], "b.wav"), **dict.fromkeys(IMAGES[2:], "b.png"), "labels": ["c"], "negatives": ["c"], "loss_scale": 0.5, "margin": 0.5, **{name: 1 for name in ("fps", "nframes", "max_pixels")},
}  # fmt: skip
VALUES |= {name: VALUES[own] for name, own in REJECTED_OWN.items()}
# Names that a user may give what zoo calls otherwise, and slips of the pen.
NEAR = {
    "image_path": "b.png", "imgs": ["b.png"], "wieght": 2.0, "lable": True, "sytem": "s", "image_url": "b.png", "video_path": "v.mp4",
    "image2": "b.png", "rejected_image_path": "b.png", "Weight": 2.0, "objets": "x", "audio_file": "b.wav",
}  # fmt: skip
METADATA = {
    "id": 3, "idx": 3, "source": "s", "url": "http://u", "split": "train", "category": "c", "language": "en", "model": "m", "height": 4, "width": 4,
    "question_id": 3, "image_id": 3, "question_type": "t", "answer_type": "t", "score": 0.5, "difficulty": "d", "meta": {"a": 1}, "title": "t",
    "num_turns": 1, "topic": "t", "timestamp": 1.5, "video_id": "v", "duration": 2.0, "image_width": 5, "tags": ["a"], "subset": "s", "length": 3,
}  # fmt: skip
# Columns that say where a medium is from, where the row has it under another key.
BESIDE = ("image_path", "image_url", "imgs", "audio_file", "audio_path", "file_name", *IMAGES[2:4], *SOUNDS[2:4])
KEYS = [*dict.fromkeys((*VALUES, *COMMON, *MEDIA, *QUALIFYING, *REJECTED, *REJECTED_OWN, *FOREIGN, *NEAR, *(key for keys in ROW_KEYS.values() for key in keys.own)))]  # fmt: skip
CASES = [(name, number) for name, rows in ROWS.items() for number in range(len(rows))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (64, 64), colour).save(folder / f"{name}.png")
        soundfile.write(folder / f"{name}.wav", np.full(8000, 0.1 * (name == "b")), 16_000)
    (folder / "v.mp4").write_bytes(b"v")
    return folder


@pytest.fixture(scope="module")
def processor(arch: dict) -> Processor:
    return build("timestamped", arch)


def made(item: dict[str, Any], folder: Path, form: Form | str | None = None) -> Row:
    return make_row(item, "x:1", Access(folder), form)


def form_of(name: str) -> str | None:
    return name if name in LABELLED or name in ("cord_v2", "llava_instruct") else None


def said(row: Row) -> Row:
    """All that a row says of its sample."""
    rejected = said(row.rejected) if isinstance(row.rejected, Row) else row.rejected
    return replace(row, form="", rejected=rejected if isinstance(rejected, Row) else repr(rejected))


def test_every_format_is_walked() -> None:
    assert set(ROWS) == set(ROW_KEYS) == set(FORMS) and set(SET_FORMATS) <= set(ROWS)
    for name, keys in ROW_KEYS.items():
        assert {*keys.own} <= {*KEYS} and keys.common in (COMMON, ("kind", "weight"), ("kind",)), name


@pytest.mark.parametrize(("name", "number"), CASES)
@pytest.mark.parametrize("named", [False, True])
def test_every_key_of_a_row_changes_it_or_is_refused_by_name(name: str, number: int, named: bool, folder: Path) -> None:
    item = ROWS[name][number]
    form = name if named else form_of(name)
    row, named = said(made(item, folder, form)), form is not None
    wrong = []
    for key in KEYS:
        value = NEAR.get(key, VALUES.get(key, "c"))
        changed = {**item, key: value}
        try:
            other = said(made(changed, folder, form))
        except RowError as error:
            names = {key, key.removesuffix("s"), f"{key}s", key.removeprefix("rejected_")}
            if not any(f"{one}" in error.message for one in names):
                wrong.append((key, error.message))
            continue
        skipped = made(changed, folder, form).skipped
        told = (
            key in skipped and (named or key in CLASSES) and key not in (*COMMON, *MEDIA, *QUALIFYING, *FOREIGN, *NEAR)
        )
        if other == row and not told and not (key in BESIDE and (row.images or row.audios)):
            wrong.append((key, "changes nothing"))
    assert not wrong


@pytest.mark.parametrize(("name", "number"), CASES)
def test_metadata_is_passed_over_and_named(name: str, number: int, folder: Path) -> None:
    item, metadata = (
        ROWS[name][number],
        {key: value for key, value in METADATA.items() if key not in ROWS[name][number]},
    )
    row = made({**item, **metadata}, folder, name)
    assert {*metadata} <= {*row.skipped} and said(replace(row, skipped=())) == said(made(item, folder, name))
    if name in ("messages", "text"):
        with pytest.raises(RowError, match="unknown key"):
            made({**item, **metadata}, folder)


def test_columns_that_are_not_read_are_said_once(folder: Path) -> None:
    rows = [{"question": "q", "answer": "a", "id": 1, "url": "u"}, {"question": "q", "answer": "a", "split": "x"}]
    entry = parse_entry({"rows": rows}, "data.train")
    notes = open_rows([entry], DataConfig(), ("text",), pytest.fail).notes(pairs=True)
    assert notes == ["rows has columns that are not read: id, url"]


def test_a_column_of_another_meaning_is_left_out_by_name(folder: Path) -> None:
    item = {"question": "q", "answer": "a", "label": 7, "margin": 0.5}
    with pytest.raises(RowError, match=r"'margin'.*columns: \{margin: null\}"):
        made(item, folder)
    entry = parse_entry({"rows": [item], "columns": {"label": None, "margin": None}}, "data.train")
    (row,) = open_rows([entry], DataConfig(), ("text",), pytest.fail).parts[0]
    plain = made({"question": "q", "answer": "a"}, folder)
    assert row == replace(plain, source=row.source, root=row.root, outside=row.outside)
    with pytest.raises(RowError, match="label is 7"):
        made({"question": "q", "answer": "a", "label": 7}, folder)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("value", ["", [], {}, None])
def test_a_key_without_a_value_is_none(value: Any, named: bool, folder: Path) -> None:
    item = {"prompt": "q", "completion": "a"}
    filled = {**item, "history": value, "input": value, "margin": value, "choices": value, "image_path": value}
    assert made(filled, folder, "prompt_completion" if named else None) == made(item, folder)


# ---------------------------------------------------------------- messages

CALL = {"name": "add", "arguments": {}}
OF_ANSWERS = {
    "weight": 0.5, "loss_scale": 0.5, "loss": False, "reasoning_content": "r", "reasoning": "r", "tool_calls": [{"function": CALL}],
    "function_call": CALL, "name": "n", "train": False, "mask": 1, "wieght": 2, "images": ["b.png"], "refusal": "no", "markdown": "x",
    "text": "t", "thinking": "t", "audio": "b.wav", "margin": 1, "tools": [TOOL], "end": True,
}  # fmt: skip
PLACES: dict[str, Any] = {
    "messages": lambda answer: {"messages": [TURNS[0], answer]},
    "conversations": lambda answer: {"conversations": [TURNS[0], answer]},
    "prompt_completion": lambda answer: {"prompt": TURNS[:1], "completion": [answer]},
    "preference": lambda answer: {"chosen": [TURNS[0], answer], "rejected": OTHER},
}
PAIRS: dict[str, Any] = {
    "conversations": lambda more: {"conversation": [{"human": "q", "assistant": "a", **more}]},
    "cauldron": lambda more: {"images": [], "texts": [{"user": "q", "assistant": "a", **more}]},
}


@pytest.mark.parametrize("key", OF_ANSWERS)
@pytest.mark.parametrize("named", [False, True])
def test_every_key_of_an_answer_changes_it_or_is_refused_by_name(key: str, named: bool, folder: Path) -> None:
    more = {key: OF_ANSWERS[key]}
    cases = [(name, build({**TURNS[1], **more}), build(TURNS[1])) for name, build in PLACES.items()]
    cases += [(name, build(more), build({})) for name, build in PAIRS.items()]
    for name, item, without in cases:
        form = name if named else None
        try:
            row = made(item, folder, form)
        except RowError as error:
            assert f"'{key}'" in error.message, (name, error.message)
            continue
        assert said(row) != said(made(without, folder, form)), name


@pytest.mark.parametrize(
    "key", ["weight", "loss_scale", "reasoning", "reasoning_content", "wieght", "images", "refusal", "lang"]
)
@pytest.mark.parametrize("name", [name for name in PLACES if name != "preference"])
def test_keys_of_a_question_are_refused_by_name(key: str, name: str, folder: Path) -> None:
    asked = {**TURNS[0], key: 0.5 if key in ("weight", "loss_scale") else "x"}
    item = {"prompt": [asked], "completion": TURNS[1:]} if name == "prompt_completion" else {name: [asked, TURNS[1]]}
    with pytest.raises(RowError, match=key.removeprefix("loss_scale") or "weight"):
        made(item, folder)


# ---------------------------------------------------------------- up to the sample


@pytest.mark.parametrize("name", [name for name in ROWS if name != "transcripts"])
def test_common_keys_are_in_the_sample(name: str, folder: Path, processor: Processor) -> None:
    item, form = ROWS[name][0], form_of(name)
    plain = processor.encode(made(item, folder, form), **HOW)
    for key in ("system", "weight", "tools"):
        if key not in ROW_KEYS[name].common:
            continue
        sample = processor.encode(made({**item, key: VALUES[key]}, folder, form), **HOW)
        same = torch.equal(plain.input_ids, sample.input_ids)
        if key == "weight":
            assert same and plain.weights is None and sample.weights is not None
        else:
            assert not same, key
