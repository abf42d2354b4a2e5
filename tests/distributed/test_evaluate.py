"""`zoo.evaluate` gives the loss of training's evaluation and the answers of `zoo.generate`, under every layout."""

from functools import partial
from pathlib import Path

import pytest
from support import rank_tasks
from support.pool import Pool

TRAIN = (
    "train.steps=2", "train.global_batch=2", "train.warmup_steps=0", "train.eval_rows=5", "data.lookahead=4",
    "packing.budget=512", "log.tensorboard=false", "log.predictions=0",
)  # fmt: skip


@pytest.mark.slow(minutes=5)
def test_every_layout_gives_the_loss_of_training_and_the_answers_of_generate(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (trained,) = pool.run(1, rank_tasks.train, [*TRAIN, f"run.dir={run}"], "qwen3_omni_sft", timeout=300.0)
    options = {"max_rows": 5, "max_new_tokens": 6, "batch": 3}

    def call(name: str, ranks: int, *overrides: str) -> object:
        task = partial(rank_tasks.call, **options)
        found = pool.run(ranks, task, name, str(run), "digits:heldout", list(overrides), timeout=300.0)
        assert all(one == found[0] for one in found)
        return found[0]

    wanted = call("evaluate", 1)
    assert wanted.rows == 5 and wanted.loss == pytest.approx(trained["metrics"]["loss"], rel=1e-5)
    said = call("generate", 1)
    assert [row["prediction"] for row in wanted.predictions] == [one["text"] for one in said]
    assert [row["answer"] for row in wanted.predictions] == [one["reference"] for one in said]
    for layout in ("tp", "ep", "pp", "cp"):
        found = call("evaluate", 2, f"parallel.{layout}=2")
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5), layout
        assert found.scores == wanted.scores, layout
    assert call("evaluate", 2).scores == wanted.scores
