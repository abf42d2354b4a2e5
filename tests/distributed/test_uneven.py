"""Sizes that ranks do not divide: layers over pipeline stages, tokens over tensor parallel ranks. Loss, gradients, runs, resumes and exports are those of one rank."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import rank_tasks
from support.families import FAMILIES
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.prepared import PACKED, lay_out
from support.rank_gradients import Held, run_layouts
from support.weights import tensors

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
    "tp2": (2, ("parallel.tp=2",)),
    "tp2, sequence parallel": (2, ("parallel.tp=2", "parallel.sp=true")),
    "tp2 pp2": (4, ("parallel.tp=2", "parallel.pp=2")),
}
FAST = ("pp2 vpp2",)
Step = Callable[..., list[Held]]


@pytest.fixture(scope="module")
def step(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A step of five layers with deepstack, and 389 tokens."""
    return _steps(pool, tmp_path_factory.mktemp("step"))


def _steps(pool: Pool, root: Path, **config: Any) -> Step:
    family = FAMILIES["qwen3_vl"].sized(num_hidden_layers=5, vocab_size=389, **config)
    made, _ = lay_out(family, GROUPS, root, which=(PACKED,))

    def run(ranks: int = 1, overrides: tuple[str, ...] = ()) -> list[Held]:
        return [held[0] for held in pool.run(ranks, run_layouts, replace(made, overrides=overrides), timeout=300.0)]

    return run


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in STEP])
def test_gradients_are_those_of_one_rank(name: str, step: Step) -> None:
    ranks, overrides = STEP[name]
    plain, found = step(), step(ranks, overrides)
    assert abs(total_loss(found) - total_loss(plain)) / total_loss(plain) < LIMIT
    error, parameter = worst(full_gradients(found), full_gradients(plain))
    assert error < LIMIT, parameter


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("parallel.tp=2",), ("parallel.tp=2", "parallel.pp=2")], ids=" ".join)
def test_a_head_that_is_the_embedding(
    overrides: tuple[str, ...], pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = _steps(pool, tmp_path_factory.mktemp("tied"), tied=True)
    plain, found = run(), run(2 ** len(overrides), overrides)
    embedding = "embedding.word_embeddings.weight"
    for part in found:  # the last stage's copy has its own name
        if (head := part.gradients.pop("output_layer.weight", None)) is not None:
            part.gradients[embedding] = head
            part.shards[embedding] = part.shards.pop("output_layer.weight")
    error, parameter = worst(full_gradients(found), full_gradients(plain))
    assert error < LIMIT, parameter


TEXT = "model.arch.{}text_config.num_hidden_layers=5"
HYBRID = "[linear_attention,full_attention,linear_attention,linear_attention,full_attention]"
PP2, VPP2, TP2 = ("parallel.pp=2",), ("parallel.pp=2", "parallel.vpp=2"), ("parallel.tp=2",)
RUNS = {  # recipe, size, its changes, layout, layout of the resumed run
    "layers": ("qwen3_omni_sft", "tiny", (TEXT.format("thinker_config."),), PP2, VPP2),
    "layers of a hybrid": (
        "qwen35_vl_moe_sft", "tiny-moe", (TEXT.format(""), f"model.arch.text_config.layer_types={HYBRID}"), PP2, VPP2,
    ),
    "tokens, on one rank then": ("qwen35_vl_moe_sft", "tiny-moe", ("model.arch.text_config.vocab_size=389",), TP2, ()),
    "tokens, on two ranks then": ("qwen3_vl_sft", "tiny", ("model.arch.text_config.vocab_size=389",), (), TP2),
}  # fmt: skip
COMMON = (
    *rank_tasks.ADAMW,
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
    "packing.align=2",  # what sequence parallelism needs, for all: the bins are the same
    "log.tensorboard=false",
    "log.predictions=0",
)
NEAR, WEIGHTS = 5e-5, 2e-4  # those of tests/distributed/test_training.py


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_under_another_layout_and_is_exported_whole(name: str, pool: Pool, tmp_path: Path) -> None:
    recipe, size, arch, layout, then = RUNS[name]

    def run(folder: Path, parallel: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        overrides = [*COMMON, *arch, *parallel, f"run.dir={folder}"]
        ranks = 2 if parallel else 1
        return pool.run(ranks, rank_tasks.train, overrides, recipe, size, timeout=300.0)[0]["steps"]

    def same(steps: list[dict[str, Any]], folder: Path) -> None:
        for mine, wanted in zip(steps, serial[-len(steps) :], strict=True):
            for key in ("loss", "grad_norm"):
                assert abs(mine[key] - wanted[key]) < NEAR * abs(wanted[key]), key
        weights = tensors(folder / "export")
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            assert weights[name].shape == tensor.shape
            assert float((weights[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)) < WEIGHTS, name

    serial = run(tmp_path / "serial")
    whole = tensors(tmp_path / "serial" / "export")
    first = tmp_path / ("cut" if layout else "serial")
    if layout:
        same(run(first, layout), first)
    resumed = tmp_path / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(first / "checkpoints" / "iter_2", resumed / "checkpoints" / "iter_2")
    same(run(resumed, then), resumed)
