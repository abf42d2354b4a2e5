"""Each family from rows to a Hugging Face folder: its recipe trains, is resumed to the bit, and transformers loads the export."""

import json
import shutil
from pathlib import Path

import pytest
from support import rank_tasks
from support.pool import Pool
from support.tiny import RECIPES
from support.weights import same, tensors

FAST = ("qwen3_omni_sft", "qwen3_vl_sft", "qwen35_vl_sft", "llava_sft")
SLOW = [
    name for name, _ in RECIPES if name not in (*FAST, "qwen3_vl_moe_sft", "qwen35_vl_moe_sft", "llava_onevision_sft")
]
COMMON = (
    "train.steps=2",
    "train.save_every=1",
    "train.global_batch=2",
    "train.warmup_steps=0",
    "train.eval_rows=2",
    "data.lookahead=4",
    "packing.budget=512",
    "log.tensorboard=false",
    "log.predictions=0",
)


@pytest.mark.parametrize("recipe", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_resumes_to_the_bit_and_its_export_loads(recipe: str, pool: Pool, tmp_path: Path) -> None:
    import transformers

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    (first,) = pool.run(1, rank_tasks.train, [*COMMON, f"run.dir={whole}"], recipe, timeout=300.0)
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "iter_1", resumed / "checkpoints" / "iter_1")
    (second,) = pool.run(1, rank_tasks.train, [*COMMON, f"run.dir={resumed}"], recipe, timeout=300.0)
    assert [step["step"] for step in second["steps"]] == [2]
    assert second["losses"][-1] == first["losses"][-1] and second["metrics"] == first["metrics"]
    same(tensors(resumed / "export"), tensors(whole / "export"))
    name, *_ = json.loads((whole / "export" / "config.json").read_text())["architectures"]
    _, report = getattr(transformers, name).from_pretrained(whole / "export", output_loading_info=True)
    assert not any(report.values()), report
