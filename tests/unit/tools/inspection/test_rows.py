"""Rows that are drawn are those of training, and every token of them is what it is drawn as."""

import json
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from zoo.cli.main import main
from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.model.build import assemble
from zoo.tools.inspection.drawing import draw_speech
from zoo.tools.inspection.lengths import filling
from zoo.tools.inspection.rows import packed_rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("name", ["qwen3_omni_sft", "llava_onevision_sft"])
def test_every_token_is_in_one_span(name: str, mode: str) -> None:
    more = ["packing.mode=none", "train.micro_batch=2"] if mode == "none" else ["packing.align=8"]
    recipe = validate(load_recipe(name, ["hardware=cpu", "packing.budget=256", "data.blank_answers=0", *more]), 1)
    rows = packed_rows(recipe, assemble(recipe), 4)
    assert len(rows) == 4
    kinds = set()
    for row in rows:
        for segment in row.segments:
            assert segment.spans[0].start == segment.start
            assert segment.spans[-1].end == segment.end
            assert all(a.end == b.start and a.kind != b.kind for a, b in pairwise(segment.spans))
            assert segment.tokens("label") > 0
            assert segment.tokens("padding") == 0
            answers = [span.text for span in segment.spans if span.kind == "label"]
            assert "qwen" not in name or all(text.endswith("<|im_end|>") for text in answers), answers
            first = row.positions[:, segment.start]
            assert bool((first == 0).all())  # positions begin anew
            kinds |= {span.kind for span in segment.spans}
        assert row.padding == row.width - sum(s.end - s.start for s in row.segments)
        assert len(row.segments) == 1 or mode == "thd"
    assert {"prompt", "label", "image"} <= kinds
    assert torch.is_tensor(rows[0].positions)


def test_a_spoken_answer_is_shown_with_the_text_that_each_frame_is_read_with(tmp_path: Path) -> None:
    recipe = validate(load_recipe("qwen3_omni_talker_sft", ["size=tiny", "hardware=cpu", "data.augment=0"]), 1)
    rows = packed_rows(recipe, assemble(recipe), 1)
    for segment in rows[0].segments:
        assert segment.speech is not None
        *words, last = (word for word in segment.speech.words if word)
        assert len(segment.speech.words) == len(segment.speech.codes) + 1 and last == "end"
        (answer,) = (span.text for span in segment.spans if span.kind == "label")
        assert "".join(words) == answer.removesuffix("<|im_end|>")
    path = draw_speech(rows, tmp_path / "speech.png")
    assert path is not None and path.stat().st_size > 10_000


def test_rows_end_where_the_epochs_of_a_run_do(tmp_path: Path) -> None:
    turns = [({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "7 " * n}) for n in range(1, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    data = [f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=none", "packing.budget=128", "train.epochs=2"]
    recipe = validate(load_recipe("qwen3_vl_sft", ["hardware=cpu", *data]), 1)
    rows = packed_rows(recipe, assemble(recipe), 10**6)
    sources = Counter(segment.source for row in rows for segment in row.segments)
    assert len(sources) == 29 and set(sources.values()) == {2}


def test_filling_counts_by_hand() -> None:
    found = filling([60, 40, 50, 50, 70, 130], budget=100, align=1, lookahead=8)
    assert (found.too_long, found.rows) == (1, 3)
    assert found.unfilled == 0.0  # the last row, of 70, is filled by what comes after
    assert found.side_by_side == pytest.approx(1 - 270 / (2 * 60 + 2 * 50 + 70))
    assert filling([10, 10], 32, 8, 8).alignment == pytest.approx(1 - 20 / 32)


class Tags(HTMLParser):
    """Counts tags, and sees that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "polyline"):
            self.open.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        if tag != "polyline":
            assert self.open.pop() == tag


def test_the_command_writes_a_picture_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "recipe=qwen3_omni_sft", "hardware=cpu", "packing.budget=256", f"out={tmp_path}"]
    assert main([*arguments, "samples=60", "rows=3", "budgets=256,512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [filling["budget"] for filling in found["fillings"]] == [256, 512]
    assert found["samples"] == 60
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    page = Tags()
    page.feed((tmp_path / "rows.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert page.classes.count("row") == 3
    assert {"prompt", "label", "padding", "segment"} <= set(page.classes)


@pytest.mark.parametrize(
    ("argument", "message"),
    [("rows=0", "rows=0: wanted a whole number above 0"), ("budgets=a", "budgets=a: wanted a whole number above 0")],
)
def test_mistakes(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "recipe=qwen3_vl_sft", argument]) == 2
    assert capsys.readouterr().err == f"zoo: error: {message}\n"
