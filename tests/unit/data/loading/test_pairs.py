"""Rows of preference pairs as samples of two segments, side by side in one packed row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from zoo.config.entries import DataEntry
from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.digits import in_words_with_wrong_answer, with_wrong_answer
from zoo.data.errors import RowError
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.pairs import rows_of
from zoo.data.loading.row_encoder import RowEncoder
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sample import IGNORE
from zoo.data.sources.identity import digest_of
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.registry import get_family

Q, A, B = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "one"), ("assistant", "no two"))
)
FOLLOWED = [Q, A, {"role": "user", "content": "more"}]


@pytest.fixture(scope="module")
def processor() -> Any:
    from zoo.config.compose import load_recipe

    arch = load_recipe("qwen3_vl_sft", ["size=tiny"]).model.arch
    family = get_family("qwen3_vl")
    return family.load("processor")(family.load("config").from_arch(arch).hf)


def source_of(items: list[dict[str, Any]], processor: Any, align: int = 1, **data: Any) -> SampleSource:
    entry = DataEntry(rows=items)
    return SampleSource.open([entry], processor, DataConfig(**data), budget=256, align=align, pairs=True)


def said(processor: Any, sample: Any) -> str:
    return processor.tokenizer.decode(sample.input_ids[sample.labels != IGNORE])


@pytest.mark.parametrize(
    "item",
    [
        {"prompt": "q", "chosen": "one", "rejected": "no two"},
        {"prompt": [Q], "chosen": [A], "rejected": [B]},
        {"chosen": [Q, A], "rejected": [Q, B]},
        {"messages": [Q, A], "rejected_response": "no two"},
        {"messages": [Q, A], "rejected_messages": [Q, B]},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "one"}, "rejected": {"from": "gpt", "value": "no two"}},
    ],
)  # fmt: skip
def test_both_answers_are_labelled(item: dict[str, Any], processor: Any) -> None:
    source = source_of([item], processor)
    sample = source.encode(0)
    end = processor.markers.end
    chosen, rejected = (said(processor, one) for one in sample.segments)
    assert (chosen.removesuffix("\n"), rejected.removesuffix("\n")) == (f"one{end}", f"no two{end}")
    size = source.measure(0)
    assert size is not None and size.length == sum(one.length for one in sample.segments)


def test_an_answer_that_both_have_is_no_label(processor: Any) -> None:
    item = {"messages": [*FOLLOWED, A], "rejected_response": "no two"}
    for one, text in zip(source_of([item], processor).encode(0).segments, ("one", "no two"), strict=True):
        assert said(processor, one).startswith(text) and said(processor, one).count("one") == text.count("one")


def test_a_pair_lies_in_one_bin_side_by_side(processor: Any) -> None:
    items = [{"prompt": "q" * (3 * n + 1), "chosen": "one", "rejected": "no two"} for n in range(8)]
    source = source_of(items, processor, align=8)
    source.references = torch.arange(16.0).view(8, 2).numpy()
    recipe = Recipe(packing=PackingConfig(budget=256), train=TrainConfig(global_batch=2))
    recipe = recipe.replace({"data.lookahead": 4})
    batches = BatchLoader(source, recipe, align=8, prefetch=False).next_step()
    seen = 0
    for batch in batches:
        assert batch.layout is not None and batch.reference is not None
        assert batch.label_weight == len(batch.lengths) / 2 and len(batch.reference) == len(batch.lengths)
        assert batch.sources[::2] == batch.sources[1::2] and batch.total <= 256
        for chosen, rejected in batch.reference.view(-1, 2).tolist():
            assert (chosen % 2, rejected) == (0, chosen + 1)
        seen += int(batch.label_weight)
    assert seen >= 4


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"messages": [Q, A]}, "no rejected answer"),
        ({"prompt": "q", "chosen": "one", "rejected": "one"}, "are the same"),
        ({"chosen": [Q, A], "rejected": FOLLOWED}, "only goes on"),
        ({"prompt": "q", "chosen": "one", "rejected": ""}, "in the rejected answer"),
        ({"prompt": "q", "chosen": "one", "rejected": "no", "weight": 2}, "has a weight"),
        ({"prompt": "q", "chosen": "one " * 150, "rejected": "no " * 150}, "over packing.budget 256"),
    ],
)
def test_rows_that_are_no_pairs_are_bad_rows(item: dict[str, Any], why: str, processor: Any) -> None:
    with pytest.raises(RowError, match=why):
        source_of([item], processor).encode(0)


def test_a_broken_rejected_answer_does_not_matter_where_the_chosen_one_is_learnt(processor: Any) -> None:
    items = [{"prompt": "q", "chosen": "one", "rejected": ""}]
    source = SampleSource.open([DataEntry(rows=items)], processor, DataConfig(), budget=256)
    assert source.encode(0).rejected is None


def test_digits_get_an_answer_that_is_wrong_in_each_place(tmp_path: Path) -> None:
    from zoo.data.digits import ROOT

    for line in (ROOT / "heldout.jsonl").read_text().splitlines()[:30]:
        item = json.loads(line)
        right, wrong = item["messages"][-1]["content"], with_wrong_answer(item)["rejected_response"]
        assert len(right) == len(wrong)
        assert all((a != b) == a.isdecimal() for a, b in zip(right, wrong, strict=True))
        spelled = in_words_with_wrong_answer(item)
        assert spelled["messages"][-1]["content"] == right and spelled["kind"] == "text"
        assert spelled["rejected_response"] != right and not spelled.keys() & {"images", "videos", "audios"}


def test_the_bundled_digits_become_pairs_by_a_format(processor: Any) -> None:
    entry = {"path": "digits:heldout", "format": "zoo.data.digits:with_wrong_answer"}
    source = SampleSource.open([entry], processor, DataConfig(), budget=512, max_rows=4, pairs=True)
    assert len(source) == 4
    for number in range(4):
        chosen, rejected = source.encode(number).segments
        assert chosen.length == rejected.length and chosen.media is rejected.media
        assert said(processor, chosen) != said(processor, rejected)


def labelled_source(items: list[dict[str, Any]], processor: Any, **data: Any) -> SampleSource:
    return SampleSource.open([DataEntry(rows=items)], processor, DataConfig(**data), budget=256, labelled=True)


def test_a_labelled_answer_brings_its_question_with_the_answer_before(processor: Any) -> None:
    items = [
        {"prompt": "q", "completion": "one", "label": True},
        {"messages": [*FOLLOWED, B], "label": False},
        {"prompt": "another", "completion": "three", "label": True},
    ]
    source, end = labelled_source(items, processor), processor.markers.end
    texts = []
    for number, sample in enumerate(map(source.encode, range(3))):
        assert sample.desirable is (number != 1) and sample.rejected is None
        texts.append([said(processor, one).strip() for one in (sample, sample.mismatched)])
        longest = max(sample.length, sample.mismatched.length)
        assert source.encoder.length(sample) == longest == source.measure(number).length
    assert texts == [
        [f"{own}{end}", f"{other}{end}"]
        for own, other in zip(("one", "no two", "three"), ("three", "one", "no two"), strict=True)
    ]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"messages": [Q, A]}, "no label"),
        ({"messages": [Q, A, Q], "label": True}, "does not end with an answer"),
        ({"messages": [Q, A], "label": True, "weight": 2}, "has a weight"),
        ({"prompt": "q", "completion": "one " * 300, "label": True}, "over packing.budget 256"),
    ],
)
def test_rows_that_are_no_labelled_answers_are_bad_rows(item: dict[str, Any], why: str, processor: Any) -> None:
    good = {"prompt": "q", "completion": "one", "label": True}
    with pytest.raises(RowError, match=why):
        labelled_source([good, item], processor).encode(1)


def test_a_label_is_true_or_false_unless_nothing_is_read_as_it(processor: Any) -> None:
    with pytest.raises(RowError, match="label is 1; a bool is wanted"):
        labelled_source([{"messages": [Q, A], "label": 1}], processor).encode(0)
    other = [{"question": "q", "answer": "one", "label": 7}]
    with pytest.raises(RowError, match=r"label is 7; a bool is wanted, or columns: \{label: null\}"):
        labelled_source(other, processor).encode(0)
    entry = DataEntry(rows=other, columns={"label": None})
    assert SampleSource.open([entry], processor, DataConfig(), budget=256).rows[0].label is None


def test_half_of_the_digits_become_wrong_answers_by_a_format(processor: Any) -> None:
    entry = {"path": "digits:heldout", "format": "zoo.data.digits:with_label"}
    source = SampleSource.open([entry], processor, DataConfig(), budget=512, labelled=True)
    labels = [row.label for row in source.rows]
    assert 0.4 < sum(labels) / len(labels) < 0.6
    plain = SampleSource.open(["digits:heldout"], processor, DataConfig(), budget=512)
    same = [one.messages == other.messages for one, other in zip(source.rows, plain.rows, strict=True)]
    assert same == labels


def coloured(folder: Path, *names: str) -> list[str]:
    """Images of one colour each, by its name."""
    for name in names:
        Image.new("RGB", (64, 64), name).save(folder / f"{name}.png")
    return [f"{name}.png" for name in names]


ASKED, RED, BLUE = (
    {"role": role, "content": text}
    for role, text in (("user", "<image>Which colour?"), ("assistant", "red"), ("assistant", "blue"))
)


def parts(image: str) -> dict[str, Any]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Which colour?"}]
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "item",
    [
        {"messages": [ASKED, RED], "images": ["red.png"], "rejected_response": "blue", "rejected_images": ["blue.png"]},
        {"messages": [ASKED, RED], "image": "red.png", "rejected_messages": [ASKED, BLUE], "rejected_images": ["blue.png"]},
        {"prompt": "Which colour?", "chosen": "red", "rejected": "blue", "image": "red.png", "rejected_image": "blue.png"},
        {"query": "Which colour?", "response": "red", "rejected_response": "blue", "images": ["red.png"], "rejected_images": ["blue.png"]},
        {"messages": [ASKED, RED], "images": ["red.png"], "rejected_images": ["blue.png"]},
        {"question": "Which colour?", "answer": "red", "image": "red.png", "rejected_images": ["blue.png"]},
        {"chosen": [parts("red.png"), RED], "rejected": [parts("blue.png"), RED]},
    ],
)  # fmt: skip
def test_the_rejected_conversation_has_media_of_its_own(item: dict[str, Any], processor: Any, tmp_path: Path) -> None:
    coloured(tmp_path, "red", "blue")
    row = make_row(item, "x:1", Access(tmp_path))
    chosen, rejected = rows_of(row)
    assert (chosen.images, rejected.images) == (("red.png",), ("blue.png",))
    samples = RowEncoder(processor, DataConfig(), pair_align=1).encode(row).segments
    pixels = [sample.media["pixel_values"] for sample in samples]
    assert pixels[0].shape == pixels[1].shape and not torch.equal(*pixels)
    assert all(sample.num_labels for sample in samples)


def test_answers_behind_other_media_are_no_shared_beginning(processor: Any, tmp_path: Path) -> None:
    coloured(tmp_path, "red", "blue", "green")
    first, then = {"role": "user", "content": "<image>?"}, {"role": "user", "content": "<image>!"}
    item = {"messages": [first, A, then, RED], "images": ["red.png", "green.png"]}
    row = make_row({**item, "rejected_images": ["red.png", "blue.png"]}, "x:1", Access(tmp_path))
    assert [one.weights for one in rows_of(row)] == [(0.0, 0.0, 1.0, 1.0)] * 2
    row = make_row({**item, "rejected_images": ["blue.png", "green.png"]}, "x:1", Access(tmp_path))
    assert [one.weights for one in rows_of(row)] == [(), ()]
    with pytest.raises(RowError, match="the same, behind the same media"):
        rows_of(make_row({**item, "rejected_images": item["images"]}, "x:1", Access(tmp_path)))


def test_digests_know_the_media_of_the_rejected_conversation(tmp_path: Path) -> None:
    coloured(tmp_path, "red", "blue", "green")
    item = {"messages": [ASKED, RED], "images": ["red.png"], "rejected_response": "blue"}
    rows = [
        make_row({**item, **more}, "x:1", Access(tmp_path))
        for more in ({}, {"rejected_images": ["blue.png"]}, {"rejected_images": ["green.png"]})
    ]
    assert len({digest_of(row) for row in rows}) == 3
