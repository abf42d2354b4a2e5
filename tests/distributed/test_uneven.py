"""Sizes that ranks do not divide: layers over pipeline stages. Loss, gradients, runs, resumes and exports are those of one rank."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import rank_tasks
from support.engine import packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.rank_gradients import Held, Layout, Plan, run_layouts
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.vision_rows import vision_examples

# Two micro-batches, and four for the interleaved schedule; the second has no media.
GROUPS = (
    ("image-long", "text-short", "multi_image-long"),
    ("text-long", "text-short"),
    ("video-short", "turns"),
    ("text-long", "image-long"),
)
STEP = {
    "pp2": (2, ("parallel.pp=2",)),
    "pp2 vpp2": (2, ("parallel.pp=2", "parallel.vpp=2")),
    "pp2, one layer beside the tower": (2, ("parallel.pp=2", "parallel.stage_layers=[1,4]")),
    "pp4": (4, ("parallel.pp=4",)),
}
Step = Callable[..., list[Held]]


@pytest.fixture(scope="module")
def step(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A step of five layers with deepstack."""
    from zoo.engine.model.build import assemble

    root = tmp_path_factory.mktemp("step")
    folder = str(write_tiny_qwen3_vl(root / "model", num_hidden_layers=5))
    examples = vision_examples(assemble(recipe_for(folder, recipe="qwen3_vl_sft")).processor)
    groups = [[examples[name].sample for name in group] for group in GROUPS]
    batches = str(root / "batches.pickle")
    Path(batches).write_bytes(pickle.dumps([packed_batch(group) for group in groups]))
    labels = sum(sample.num_labels for group in groups for sample in group)

    def run(ranks: int = 1, overrides: tuple[str, ...] = ()) -> list[Held]:
        plan = Plan(
            folder=folder,
            batches=batches,
            labels=labels,
            overrides=overrides,
            recipe="qwen3_vl_sft",
            layouts=(Layout(batches),),
        )
        return [held[0] for held in pool.run(ranks, run_layouts, plan, timeout=300.0)]

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "pp2 vpp2" else pytest.mark.slow) for n in STEP]
)
def test_gradients_are_those_of_one_rank(name: str, step: Step) -> None:
    ranks, overrides = STEP[name]
    plain, found = step(), step(ranks, overrides)
    assert abs(total_loss(found) - total_loss(plain)) / total_loss(plain) < LIMIT
    error, parameter = worst(full_gradients(found), full_gradients(plain))
    assert error < LIMIT, parameter


TEXT = "model.arch.{}text_config.num_hidden_layers=5"
HYBRID = "[linear_attention,full_attention,linear_attention,linear_attention,full_attention]"
RUNS = {
    "qwen3_omni_sft": ("tiny", (TEXT.format("thinker_config."),)),
    "qwen35_vl_moe_sft": ("tiny-moe", (TEXT.format(""), f"model.arch.text_config.layer_types={HYBRID}")),
}
COMMON = (
    "train.steps=3",
    "train.global_batch=4",
    "train.warmup_steps=0",
    "train.lr=1e-3",
    "train.eps=1e-4",
    "train.eval_rows=4",
    "train.save_every=2",
    "data.lookahead=8",
    "data.augment=0",
    "packing.budget=512",
    "log.tensorboard=false",
    "log.predictions=0",
)
NEAR, WEIGHTS = 5e-5, 2e-4  # those of tests/distributed/test_training.py


def exported(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "export").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_resumes_under_other_stages_and_is_exported_whole(
    recipe: str, pool: Pool, tmp_path: Path
) -> None:
    size, arch = RUNS[recipe]

    def run(folder: Path, ranks: int, *parallel: str) -> list[dict[str, Any]]:
        overrides = [*COMMON, *arch, *parallel, f"run.dir={folder}"]
        return pool.run(ranks, rank_tasks.train, overrides, recipe, size, timeout=300.0)[0]["steps"]

    def same(steps: list[dict[str, Any]], folder: Path) -> None:
        for mine, wanted in zip(steps, serial[-len(steps) :], strict=True):
            for key in ("loss", "grad_norm"):
                assert abs(mine[key] - wanted[key]) < NEAR * abs(wanted[key]), key
        weights = exported(folder)
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            assert weights[name].shape == tensor.shape
            assert float((weights[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)) < WEIGHTS, name

    serial = run(tmp_path / "serial", 1)
    whole = exported(tmp_path / "serial")
    same(run(tmp_path / "pp2", 2, "parallel.pp=2"), tmp_path / "pp2")
    resumed = tmp_path / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(tmp_path / "pp2" / "checkpoints" / "iter_2", resumed / "checkpoints" / "iter_2")
    same(run(resumed, 2, "parallel.pp=2", "parallel.vpp=2"), resumed)
