"""What a plan says of a rank's memory, against what every rank of a real step holds: within a tenth."""

from pathlib import Path

import pytest
from support.pool import Pool
from support.rank_tasks import run_bytes

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.engine.planning import model_of
from zoo.plan.memory import memory

ROW = ("packing.budget=1024", "data.augment=0", "data.train=digits:train", "data.eval=digits:heldout")
ALONE = [
    ("qwen3_vl_sft", "tiny"),
    ("qwen3_vl_moe_sft", "tiny-moe"),
    ("qwen35_vl_sft", "tiny"),
    ("qwen35_vl_moe_sft", "tiny-moe"),
    ("qwen3_omni_sft", "tiny"),
    ("llava_sft", "tiny"),
    ("llava_onevision_sft", "tiny-onevision"),
]
MORE = [
    *(
        (name, size, 1, f"engine.recompute={how}")
        for name, size in ALONE[:5]
        for how in ("selective", "full")
    ),
    ("qwen3_vl_sft", "tiny", 1, "model.freeze=[vision]"),
    ("qwen3_vl_sft", "tiny", 2, ""),
    ("qwen3_vl_sft", "tiny", 2, "parallel.tp=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.tp=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.ep=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.tp=2 parallel.etp=2"),
    ("qwen35_vl_moe_sft", "tiny-moe", 2, "parallel.pp=2"),
    ("qwen3_vl_sft", "tiny", 2, "parallel.pp=2 parallel.vpp=2"),
    ("llava_sft", "tiny", 4, "parallel.tp=2 parallel.pp=2"),
    ("qwen3_vl_moe_sft", "tiny-moe", 4, "parallel.ep=2 parallel.pp=2"),
    ("qwen3_vl_sft", "tiny", 2, "parallel.cp=2"),
]


@pytest.mark.parametrize(
    ("name", "size", "ranks", "keys"), [*((name, size, 1, "") for name, size in ALONE), *MORE]
)
def test_bytes_of_every_rank(name: str, size: str, ranks: int, keys: str, pool: Pool, tmp_path: Path) -> None:
    overrides = (f"size={size}", *ROW, *keys.split())
    recipe = validate(load_recipe(name, list(overrides)), ranks)
    model = model_of(recipe)
    for held in pool.run(ranks, run_bytes, name, overrides, str(tmp_path)):
        plans = [memory(model, recipe, row, ranks, fused=False)[held.pp_rank] for row in held.rows]
        plan = plans[0]
        assert plan.weights == held.weights
        assert plan.grads == pytest.approx(held.grads, rel=0.1)
        assert plan.optimizer == pytest.approx(held.optimizer, rel=0.1)
        widest = max(plan.activations for plan in plans)
        assert widest == pytest.approx(held.activations, rel=0.1)
