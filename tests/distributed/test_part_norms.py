"""log.part_norms_every: norms of the gradient by part, under parallel layouts as on one rank."""

import math
from pathlib import Path
from typing import Any

import pytest
from support import rank_tasks
from support.pool import Pool
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

COMMON = (
    "train.steps=2", "train.global_batch=4", "train.warmup_steps=0", "train.clip_grad=0.1", "train.eval_rows=0", "data.eval=none", "data.lookahead=8",
    "data.augment=0", "packing.budget=256", "packing.align=8", "log.tensorboard=false", "log.part_norms_every=1", "export=false",
)  # fmt: skip
LAYOUTS = {
    "dp": ((), 2), "tp": (("parallel.tp=2",), 2), "pp": (("parallel.pp=2",), 2), "cp": (("parallel.cp=2",), 2), "ep": (("parallel.ep=2",), 2),
    "tp-pp": (("parallel.tp=2", "parallel.pp=2"), 4), "ep-etp": (("parallel.tp=2", "parallel.ep=2", "parallel.etp=2"), 4),
}  # fmt: skip
PARTS = {
    "qwen3_omni_sft": "audio audio_projector embedding experts head language merger router vision",
    "qwen3_vl_sft": "embedding language merger vision",  # its head is tied to the embedding
}


def norms(pool: Pool, folder: Path, recipe: str, ranks: int, keys: tuple[str, ...]) -> list[dict[str, float]]:
    """`grad_norm` of each step, and those of the parts."""
    done: Any = pool.run(ranks, rank_tasks.train, (*COMMON, *keys, f"run.dir={folder}"), recipe, "tiny", timeout=600.0)
    return [{name: step[name] for name in step if name.startswith("grad_norm")} for step in done[0]["steps"]]


@pytest.mark.parametrize(
    "layout", [name if name in ("tp", "ep") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
@pytest.mark.parametrize("recipe", ["qwen3_omni_sft", pytest.param("qwen3_vl_sft", marks=pytest.mark.slow)])
def test_norms_by_part_are_those_of_one_rank(recipe: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    keys, ranks = LAYOUTS[layout]
    more = () if recipe == "qwen3_omni_sft" else (f"model.init={write_tiny_qwen3_vl(tmp_path / 'model', tied=True)}",)
    if recipe == "qwen3_vl_sft" and "ep" in layout:
        pytest.skip("it has no experts")
    wanted = norms(pool, tmp_path / "one", recipe, 1, more)
    assert {name.removeprefix("grad_norm_") for name in wanted[0]} == {"grad_norm", *PARTS[recipe].split()}
    for step in wanted:
        parts = [value for name, value in step.items() if name != "grad_norm"]
        assert math.hypot(*parts) == pytest.approx(step["grad_norm"], rel=1e-6) and min(parts) > 0
    found = norms(pool, tmp_path / "many", recipe, ranks, (*more, *keys))
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert found[1] == pytest.approx(wanted[1], rel=1e-3)
    assert len(found) == len(wanted) == 2
