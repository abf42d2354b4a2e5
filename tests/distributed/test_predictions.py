"""Predictions while training change no number of the run, and are those of `zoo.generate` under every layout."""

import json
from functools import partial
from pathlib import Path

import pytest
from support import rank_tasks
from support.pool import Pool

TRAIN = (
    "train.steps=3", "train.eval_every=1", "train.global_batch=2", "train.warmup_steps=0", "train.eval_rows=5", "data.lookahead=4",
    "packing.budget=512", "log.tensorboard=false", "log.prediction_tokens=6",
)  # fmt: skip


def train(pool: Pool, folder: Path, ranks: int, *overrides: str) -> list[dict]:
    given = [*TRAIN, *overrides, f"run.dir={folder}"]
    return pool.run(ranks, rank_tasks.train, given, "qwen3_omni_sft", timeout=300.0)[0]["steps"]


def predictions(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def numbers(steps: list[dict]) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in steps]


@pytest.mark.slow(minutes=8)
def test_numbers_stay_and_answers_are_those_of_generate(pool: Pool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    plain = train(pool, base, 1, "log.predictions=0", "train.save_every=1", "train.keep=3")
    assert not (base / "predictions.jsonl").exists()
    shown = tmp_path / "shown"
    assert numbers(train(pool, shown, 1)) == numbers(plain)
    found = predictions(shown)
    assert [one["step"] for one in found] == [step for step in (1, 2, 3) for _ in range(5)]
    assert (shown / "plots" / "predictions.png").is_file()

    def said(folder: Path) -> list[str]:
        ask = partial(rank_tasks.call, max_rows=5, max_new_tokens=6, batch=5)
        (rows,) = pool.run(1, ask, "generate", str(folder), "digits:heldout", [], timeout=300.0)
        return [one["text"] for one in rows]

    assert [one["prediction"] for one in found[-5:]] == said(shown)
    for layout in ("parallel.tp=2", "parallel.ep=2", "parallel.pp=2", "parallel.cp=2", "train.log_every=1"):
        folders = [tmp_path / layout / name for name in ("with", "without")]
        with_them = train(pool, folders[0], 2, layout)
        assert numbers(with_them) == numbers(train(pool, folders[1], 2, layout, "log.predictions=0")), layout
        assert [one["prediction"] for one in predictions(folders[0])[-5:]] == said(folders[0]), layout


@pytest.mark.slow(minutes=3)
def test_dropout_and_a_resumed_run_stay_as_they_are(pool: Pool, tmp_path: Path) -> None:
    adapters = ("lora.rank=4", "lora.dropout=0.2", "train.lr=0.01")
    plain = train(pool, tmp_path / "plain", 1, *adapters, "log.predictions=0")
    shown = tmp_path / "shown"
    train(pool, shown, 1, *adapters, "train.steps=2", "run.accept_changes=[train]")
    whole = train(pool, shown, 1, *adapters)
    assert [one["step"] for one in predictions(shown)] == [step for step in (1, 2, 3) for _ in range(5)]
    again = train(pool, tmp_path / "again", 1, *adapters)
    assert numbers(again) == numbers(plain)
    assert len(whole) == 3
