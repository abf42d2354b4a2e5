"""A run on queries and candidates under every layout has the losses, gradient norms and rankings of one rank with one micro-batch."""

import json
from pathlib import Path

import pytest
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.preference import OF_MODELS, pair_run
from support.retrieval import write_rows

FAST = ("dp2", "dense", "last")
CASES = [
    FAST,
    ("cp2", "dense", "mean"),
    ("pp2", "dense", "last"),
    ("pp2 vpp2", "gdn", "mean"),
    ("tp2 sp", "moe", "last"),
    ("tp2 sp", "text", "mean"),
    ("tp2 cp2", "llava", "mean"),
    ("cp2 ep2", "omni", "last"),
    ("ep2", "moe", "last"),
]
STEP = ("loss", "grad_norm", "queries", "batch_recall@1")
EVALUATION = ("loss", "recall@1", "recall@5", "recall@10", "ndcg@10", "rows")


@pytest.mark.parametrize(
    ("parallel", "name", "pooling"),
    [pytest.param(*case, marks=[] if case == FAST else pytest.mark.slow) for case in CASES],
)
def test_a_layout_trains_as_one_rank_with_one_micro_batch(
    parallel: str, name: str, pooling: str, pool: Pool, tmp_path: Path
) -> None:
    """As long as all rows are in one step, it is the same step however they are dealt out."""
    model, setting = MODELS[name], PARALLEL[parallel]
    folder = model.write(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", 4, OF_MODELS.get(name, ("image", "text")))
    common = (
        *data, *model.overrides, f"model.init={folder}", "train.epochs=1", "train.lr=1e-2", "train.schedule=constant",
        "train.warmup_steps=0", "packing.align=8", "train.aux_loss=0", f"embed.pooling={pooling}", "embed.dimensions=[16, 32]",
        "embed.instruction=Which picture?",
    )  # fmt: skip
    runs = {
        "alone": (1, ("train.global_batch=1", "packing.budget=8192")),
        "spread": (setting.ranks, ("train.global_batch=64", "packing.budget=512", *setting.overrides)),
    }
    found = {}
    for case, (ranks, more) in runs.items():
        overrides = (*common, *more, f"run.dir={tmp_path / case}")
        (step,) = pool.run(ranks, pair_run, model.recipe, overrides, "batch_recall@1", timeout=300.0)[0]
        found[case] = [step[key] for key in STEP], [evaluation(tmp_path / case)[key] for key in EVALUATION]
    assert found["spread"][0] == pytest.approx(found["alone"][0], rel=1e-5)
    assert found["spread"][1] == pytest.approx(found["alone"][1], rel=1e-4)
    assert found["alone"][1][0] != pytest.approx(found["alone"][0][0], rel=1e-2), "the update moved nothing"


def evaluation(folder: Path) -> dict[str, float]:
    """The run's evaluation."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return next(line for line in lines if line.get("event") == "eval")
