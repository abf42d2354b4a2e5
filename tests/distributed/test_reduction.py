"""Gradients that are reduced during the backward pass, as on GPUs: right in every step, whatever media a rank has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, worst
from support.matrix import MODELS
from support.pool import Pool
from support.rank_gradients import Layout, Plan, run_overlapped, run_step

STEPS = 3  # from the second on a reduction begins with the last gradient of its bucket
BUCKET = 20_000  # elements: towers have several buckets
CASES = {
    "dp2": ("dense", (), (("image-long", "video-short"), ("text-long", "text-short"))),
    "dp2 with audio": ("omni", (), (("image+video+audio",), ("text-long",))),
    "cp2": ("dense", ("parallel.cp=2",), (("text-short",), ("image-long",))),  # the other rank encodes nothing
    "ep2": ("omni", ("parallel.ep=2",), (("image-long", "audio-short"), ("text-long",))),
    "tp2": ("dense", ("parallel.tp=2", "parallel.sp=true"), (("image-long",), ("text-long",))),
    "pp2": ("dense", ("parallel.pp=2",), (("image-long", "video-short"), ("text-long", "text-short"))),
}


@pytest.mark.parametrize("case", CASES)
def test_reductions_while_the_backward_pass_goes_on(
    case: str, pool: Pool, tmp_path: Path, store: Callable[[list[Any]], str]
) -> None:
    from zoo.model.build import assemble

    name, overrides, groups = CASES[case]
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    examples = model.examples(assemble(recipe_for(folder, recipe=model.recipe)).processor)
    rows = [[examples[row].sample for row in group] for group in groups]
    stored = store([packed_batch(group) for group in rows])
    plan = Plan(
        folder=str(folder),
        batches=stored,
        labels=sum(row.num_labels for group in rows for row in group),
        overrides=(*model.overrides, *overrides),
        recipe=model.recipe,
        layouts=(Layout(stored),) * STEPS,
    )
    alone = Plan(**{**vars(plan), "overrides": model.overrides})
    wanted = full_gradients(pool.run(1, run_step, alone))
    steps = zip(*pool.run(2, run_overlapped, plan, BUCKET), strict=True)
    for held in steps:
        error, where = worst(full_gradients(held), wanted)
        assert error < LIMIT, where
