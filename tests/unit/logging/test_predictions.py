"""Held-out rows with the model's answers: the lines, the file, the picture, TensorBoard."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.config.compose import load_recipe
from zoo.config.schema import DataConfig
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.sources.rows import Message, Row, read_rows
from zoo.logging.callbacks.callbacks import open_callbacks
from zoo.logging.predictions_plot import Prediction, block, plot_predictions
from zoo.logging.run_log import RunLog

DECODER = decoder_for(DataConfig())
GREEN, RED = (26, 143, 75), (200, 49, 59)


def some(right: int) -> list[Prediction]:
    """A row of each kind of the bundled set; the first few are right."""
    rows = {row.kind: row for row in read_rows("digits:heldout")}
    found = []
    for number, row in enumerate(rows.values()):
        answer = row.messages[-1].content
        found.append(Prediction(row, answer, answer if number < right else "$x_{1", number < right))
    return found


def has(path: Path, colour: tuple[int, int, int]) -> bool:
    with Image.open(path) as image:
        return bool((np.asarray(image.convert("RGB")) == colour).all(-1).sum() > 100)


def test_right_and_wrong_are_marked_in_the_picture(tmp_path: Path) -> None:
    both = plot_predictions(tmp_path, 3, some(2), DECODER)
    assert both == tmp_path / "plots" / "predictions.png"
    assert has(both, GREEN) and has(both, RED)
    right = plot_predictions(tmp_path, 4, some(7)[:1], DECODER)
    assert has(right, GREEN) and not has(right, RED)


@pytest.mark.parametrize("text", ["0" * 256, "W" * 300, "a long answer in words " * 20, "\u6f22\u5b57" * 80])
def test_long_texts_stay_on_their_card(text: str, tmp_path: Path) -> None:
    messages = (Message("user", text), Message("assistant", text))
    shown = [Prediction(Row(messages, kind=text[:100]), text, text, False)]
    with Image.open(plot_predictions(tmp_path, 1, shown, DECODER)) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width, _ = pixels.shape
    beside = pixels[height // 4 :, width // 2 :]  # the second card's place, which is empty
    assert (beside == 255).all()
    assert (pixels[-int(0.02 * height) :] == 255).all()


def test_media_that_are_gone_leave_the_texts(tmp_path: Path) -> None:
    row = replace(some(1)[0].row, images=("gone.png",), videos=(), audios=(), root=tmp_path)
    assert plot_predictions(tmp_path, 1, [Prediction(row, "1", "", False)], DECODER).is_file()


SHOWN = {
    "<image> <image>What is it?": "What is it?", "<image> then <image>. Read.": "then [image] . Read.", "Write 5.": "Write 5.",
}  # fmt: skip


def test_prompts_are_shown_without_the_marks_before_them() -> None:
    before, after = (Message("user", "first"), Message("assistant", "a")), Message("assistant", "b")
    for text, wanted in SHOWN.items():
        assert Prediction(Row((*before, Message("user", text), after)), "b", "c", False).prompt == wanted


def test_the_log_has_them_and_forgets_those_of_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe("qwen3_omni_sft", ["size=tiny", f"run.dir={tmp_path}"])
    log, callbacks = RunLog(recipe, 4, 0, main=True), open_callbacks(recipe, [], main=True)
    callbacks.start(0)
    for step in (2, 4):
        callbacks.predictions(step, log.predictions(step, some(1)[:2]))
    callbacks.predictions(4, log.predictions(4, []))
    callbacks.end(4, None, "finished")
    callbacks.raise_failure(4, None, ended=True)
    written = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [(line["step"], line["right"]) for line in written] == [(2, True), (2, False), (4, True), (4, False)]
    assert set(written[0]) == {"step", "source", "kind", "prompt", "answer", "prediction", "right"}
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert board.Tags()["images"] == ["predictions"]
    assert [image.step for image in board.Images("predictions")] == [2, 4]
    RunLog(recipe, 4, 2, main=True)
    kept = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [2, 2]
    assert block(2, some(1)[:2]).splitlines()[0] == "answers to 2 held-out rows at step 2, 1 right:"
