"""Stretched rotary embeddings, windows and biases on several ranks: loss and gradients are those of one rank, sample by sample."""

import pytest
from support.families import FAMILIES
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.prepared import PACKED, PADDED, Prepared, lay_out
from support.rank_gradients import run_layouts
from support.tiny import ROPE
from support.tiny_qwen25_vl import SECTIONS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
MODELS = {
    "qwen3": (WINDOW | {"attention_bias": True, "rope_parameters": ROPE | YARN}, ("text-short", "text-long")),
    "qwen25_vl": (WINDOW | {"rope_parameters": SECTIONS | YARN}, ("image-long", "text-long")),
}
LAYOUTS = {
    "tp2": (2, ("parallel.tp=2", "parallel.sp=false")),
    "tp2, sequence parallel": (2, ("parallel.tp=2", "parallel.sp=true")),
    "cp2": (2, ("parallel.cp=2",)),
    "tp2 cp2": (4, ("parallel.tp=2", "parallel.cp=2")),
}


@pytest.fixture(scope="module", params=MODELS)
def prepared(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    sizes, rows = MODELS[request.param]
    family = FAMILIES[request.param].sized(**sizes)
    root = tmp_path_factory.mktemp("long")
    return Prepared.run(pool, lay_out(family, (rows, rows[:1]), root, which=(PADDED, PACKED)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_are_one(layout: str, pool: Pool, prepared: Prepared) -> None:
    ranks, overrides = LAYOUTS[layout]
    held = pool.run(ranks, run_layouts, prepared.with_overrides(*overrides), timeout=300.0)
    for found in zip(*held, strict=True):
        assert abs(total_loss(found) - prepared.loss) / prepared.loss < LIMIT
        error, name = worst(full_gradients(found), prepared.gradients)
        assert error < LIMIT, name
