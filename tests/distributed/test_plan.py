"""What a plan says of a rank's memory, against what every rank of a real step holds: within a tenth."""

from pathlib import Path
from statistics import mean

import pytest
from support.matrix import MODELS
from support.pool import Pool
from support.rank_tasks import run_bytes
from support.tiny import RECIPES
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

from zoo.config.compose import load_recipe
from zoo.config.derived import trains_thinker
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.planner.memory import Memory, in_flight, memory
from zoo.planner.plan import model_of

pytestmark = pytest.mark.slow

ROW = ("packing.budget=1024", "data.augment=0", "data.train=digits:train", "data.eval=digits:heldout")
MORE = [
    *((name, size, 1, f"engine.recompute={how}") for name, size in RECIPES[:5] for how in ("selective", "full")),
    ("qwen3_vl_sft", "tiny", 1, "model.freeze=[vision]"),
    ("qwen3_vl_lora", "tiny", 1, ""),
    ("qwen3_vl_moe_lora", "tiny-moe", 2, "parallel.ep=2"),
    ("qwen3_vl_lora", "tiny", 2, "parallel.tp=2"),
    ("qwen3_vl_sft", "tiny", 2, ""),
    ("qwen3_vl_sft", "tiny", 2, "parallel.tp=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.tp=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.ep=2"),
    ("qwen3_omni_sft", "tiny", 2, "parallel.tp=2 parallel.etp=2"),
    ("qwen35_vl_moe_sft", "tiny-moe", 2, "parallel.pp=2"),
    ("qwen3_vl_sft", "tiny", 2, "parallel.pp=2 parallel.vpp=2"),
    ("qwen3_vl_sft", "tiny", 2, "parallel.pp=2 parallel.stage_layers=[1,3]"),
    ("llava_sft", "tiny", 4, "parallel.tp=2 parallel.pp=2"),
    ("internvl_sft", "tiny-moe", 1, ""),
    ("qwen3_vl_moe_sft", "tiny-moe", 4, "parallel.ep=2 parallel.pp=2"),
    ("qwen3_vl_sft", "tiny", 2, "parallel.cp=2"),
    # without dropout, of which a CPU keeps a mask of floats
    ("qwen3_vl_lora", "tiny", 2, "lora.dropout=0 lora.rank=4 parallel.tp=2"),
    ("qwen3_vl_lora", "tiny", 1, "lora.dropout=0 lora.whole_parts=[merger]"),
    ("qwen3_vl_lora", "tiny", 2, "lora.dropout=0 lora.whole_parts=[vision] parallel.tp=2"),
    ("qwen3_omni_lora", "tiny", 2, "lora.dropout=0 lora.whole_parts=[vision,audio_projector] parallel.pp=2"),
    *((f"{family}_talker_sft", "tiny", 1, "") for family in ("qwen3_omni", "qwen25_omni")),
    ("qwen3_omni_speech_sft", "tiny", 1, ""),
    ("qwen3_omni_talker_sft", "tiny", 1, "engine.recompute=full"),
    ("qwen3_omni_talker_sft", "tiny", 2, "parallel.tp=2"),
    ("qwen3_omni_talker_sft", "tiny", 2, "parallel.cp=2"),
    ("qwen3_omni_talker_sft", "tiny", 2, "parallel.pp=2"),
    ("qwen3_omni_speech_sft", "tiny", 2, "parallel.pp=2"),
]


@pytest.mark.parametrize(("name", "size", "ranks", "keys"), [*((name, size, 1, "") for name, size in RECIPES), *MORE])
def test_bytes_of_every_rank(name: str, size: str, ranks: int, keys: str, pool: Pool, tmp_path: Path) -> None:
    row = ROW[:2] if "talker" in name or "speech" in name else ROW  # whose own rows are spoken
    overrides = (f"size={size}", *row, *keys.split())
    recipe = validate(load_recipe(name, list(overrides)), ranks)
    model = model_of(recipe)
    stages: dict[int, list[float]] = {}  # activations held over those planned, of each stage's ranks
    for held in pool.run(ranks, run_bytes, name, overrides, str(tmp_path)):
        plans = [memory(model, recipe, row, ranks, fused=False)[held.pp_rank] for row in held.rows]
        assert plans[0].weights == held.weights
        assert plans[0].grads == pytest.approx(held.grads, rel=0.01)
        assert plans[0].optimizer == pytest.approx(held.optimizer, rel=0.01)
        in_turn = model.talker is not None and not trains_thinker(recipe) and held.pp_rank < recipe.parallel.pp - 1
        most = max(plan.activations for plan in plans) if in_turn else widest(plans, recipe, held.pp_rank)
        stages.setdefault(held.pp_rank, []).append(held.activations / most)
    limit = 0.15 if recipe.parallel.ep > 1 else 0.1  # experts are not asked for evenly: 1.13 was measured
    for stage, shares in stages.items():
        assert mean(shares) == pytest.approx(1.0, abs=limit), (stage, shares)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bytes_of_compact_state(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    """Weights in bf16 and 16 bits more, moments of one and two bytes, gradients of two; activations are those of a GPU."""
    keys = f"train.exp_avg_dtype=fp8 train.exp_avg_sq_dtype=bf16 train.main_grads_dtype=bf16 parallel.ep=2 train.optimizer={optimizer}"
    overrides = ("size=tiny-moe", *ROW, "engine.precision=bf16", *keys.split())
    recipe = validate(load_recipe("qwen3_vl_moe_sft", list(overrides)), 2)
    model = model_of(recipe)
    ranks = pool.run(2, run_bytes, "qwen3_vl_moe_sft", overrides, str(tmp_path))
    for held in ranks:
        plan = memory(model, recipe, held.rows[0], 2, fused=False)[0]
        assert plan.weights == pytest.approx(held.weights, rel=0.01)
        assert plan.grads == pytest.approx(held.grads, rel=0.01)
        limit = 0.01 if optimizer == "adamw" else 0.1  # second moments are with the ranks whose ranges hold embeddings
        assert plan.optimizer == pytest.approx(held.optimizer, rel=limit)
    assert plan.optimizer == pytest.approx(mean(held.optimizer for held in ranks), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["parallel.tp=2", "parallel.pp=2 parallel.stage_layers=[1,3]"])
def test_bytes_of_a_teacher(keys: str, pool: Pool, tmp_path: Path) -> None:
    """A larger model beside the student is cut under the same layout, and is among the weights of a plan alone."""
    student, teacher = MODELS["dense"].write(tmp_path / "student"), tmp_path / "teacher"
    write_tiny_qwen3_vl(teacher, num_hidden_layers=6)
    name = MODELS["dense"].recipe
    overrides = (*ROW, f"model.init={student}", f"distill.teacher={teacher}", "distill.top_k=8", *keys.split())
    recipe = validate(load_recipe(name, list(overrides)), 2)
    model, plain = model_of(recipe), model_of(recipe.replace({"distill.teacher": None}))
    for held in pool.run(2, run_bytes, name, overrides, str(tmp_path / "run")):
        plan, alone = (memory(one, recipe, held.rows[0], 2, fused=False)[held.pp_rank] for one in (model, plain))
        assert alone.weights == held.weights and held.teacher > 0
        assert plan.weights == held.weights + held.teacher
        assert (plan.grads, plan.optimizer) == (alone.grads, alone.optimizer)


def widest(plans: list[Memory], recipe: Recipe, stage: int) -> float:
    """Activations of as many rows as a stage holds at once, each planned as if all were like it; the most there are."""
    held = min(len(plans), max(1, round(in_flight(recipe, stage, len(plans)))))
    return max(mean(plan.activations for plan in plans[first : first + held]) for first in range(len(plans) - held + 1))
