"""Copies of one weight on several pipeline stages: equal to the bit after every step, in a resumed run, and in the export.

Tied heads and embeddings that multi-token prediction reads, in every format of moments.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import optimizer_tasks, rank_tasks
from support.optimizer_tasks import Parts
from support.pool import Pool
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen35 import write_tiny_qwen35

COMMON = (
    *rank_tasks.ADAMW, "train.global_batch=4", "train.warmup_steps=0", "train.lr=2e-3", "train.eval_rows=2", "train.keep=9",
    "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4", "log.tensorboard=false", "log.predictions=0",
    "export=false",
)  # fmt: skip
MUON = ("train.optimizer=muon", "train.matrix_lr_scale=1")
PP2, PP4 = ("parallel.pp=2",), ("parallel.pp=4",)
LAYOUTS = {
    "pp2": (2, PP2),
    "pp2 vpp2": (2, (*PP2, "parallel.vpp=2")),
    "pp2 tp2": (4, (*PP2, "parallel.tp=2")),
    "pp2 dp2": (4, PP2),
    "pp2 cp2": (4, (*PP2, "parallel.cp=2")),
    "pp4": (4, PP4),
}
STEPS = 4


def model(kind: str, folder: Path) -> tuple[tuple[str, ...], str, str]:
    """Overrides, recipe and size of a model whose last stage has a copy of the embedding."""
    if kind == "predicts ahead":
        return (), "qwen35_vl_moe_sft", "tiny-moe"
    if kind == "tied":
        source = write_tiny_qwen3_vl(folder, tied=True, num_hidden_layers=4)
        return (f"model.init={source}",), "qwen3_vl_sft", "tiny"
    source = write_tiny_qwen35(folder, tied=True, mtp=1)
    return (f"model.init={source}", "train.mtp_loss=0.1"), "qwen35_vl_sft", "tiny"


def moments(dtype: str) -> tuple[str, ...]:
    return f"train.exp_avg_dtype={dtype}", f"train.exp_avg_sq_dtype={dtype}"


def check(ranks: list[Parts]) -> None:
    """Every part of the model is the same on all ranks that hold it, and the copies have no state."""
    seen: dict[Any, str] = {}
    for one in ranks:
        for key, digest in one.digests.items():
            assert seen.setdefault(key, digest) == digest, key
    assert any(one.copied for one in ranks) and any(key[0] == "shared" for key in seen)
    assert all((one.stateless > 0) == one.copied for one in ranks)


def run(pool: Pool, kind: str, layout: str, keys: tuple[str, ...], folder: Path) -> None:
    ranks, sizes = LAYOUTS[layout]
    more, recipe, size = model(kind, folder / "model")
    overrides = (*COMMON, *more, *sizes, *keys, f"run.dir={folder / 'run'}")
    check(pool.run(ranks, optimizer_tasks.parts, overrides, recipe, size, STEPS, timeout=300.0))


def test_copies_stay_equal(pool: Pool, tmp_path: Path) -> None:
    run(pool, "predicts ahead", "pp2", ("engine.precision=bf16", *moments("bf16")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["predicts ahead", "tied", "tied, predicts ahead"])
def test_copies_stay_equal_under_every_layout(kind: str, layout: str, dtype: str, pool: Pool, tmp_path: Path) -> None:
    run(pool, kind, layout, ("engine.precision=bf16", *moments(dtype)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (*MUON, "train.exp_avg_dtype=fp8", "train.exp_avg_sq_dtype=bf16", "engine.precision=bf16"),
        ("train.optimizer_offload_fraction=0.5", *moments("bf16"), "engine.precision=bf16"),
        ("train.optimizer_offload_fraction=1", *moments("fp8"), "engine.precision=fp32"),
        ("train.lr_scale={vision: 0.1}", "train.clip_grad=0.1", *moments("fp8"), "engine.precision=fp32"),
    ],
    ids=["muon", "half on the host", "all on the host", "fp32 weights"],
)
@pytest.mark.parametrize("layout", ["pp2 tp2", "pp2 dp2"])
def test_copies_stay_equal_under_every_optimizer(
    layout: str, keys: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    run(pool, "tied", layout, keys, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2 dp2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_to_the_bit_and_its_export_is_what_it_trained(
    optimizer: str, dtype: str, layout: str, pool: Pool, tmp_path: Path
) -> None:
    """Losses, checkpoints and the held-out loss; that of the export is computed on one rank, without a copy."""
    ranks, sizes = LAYOUTS[layout]
    more, recipe, size = model("tied", tmp_path / "model")
    formats = (f"train.exp_avg_dtype={dtype}", f"train.exp_avg_sq_dtype={dtype}")
    keys = [*COMMON, *more, *sizes, *formats, "train.steps=6", "train.save_every=3", "train.eval_rows=5", "export=true"]
    keys += [*(MUON if optimizer == "muon" else ()), "engine.precision=fp32", f"run.dir={tmp_path / 'run'}"]

    def train() -> tuple[Any, dict[str, bytes]]:
        result = pool.run(ranks, rank_tasks.train, keys, recipe, size, timeout=300.0)[0]
        last = tmp_path / "run/checkpoints/iter_6"
        return result, {path.name: path.read_bytes() for path in last.glob("*.bin")}

    first, whole = train()
    shutil.rmtree(tmp_path / "run/checkpoints/iter_6")
    shutil.rmtree(tmp_path / "run/export")
    (tmp_path / "run/summary.json").unlink()
    second, again = train()
    assert first["losses"] == second["losses"] and first["metrics"] == second["metrics"]
    assert whole == again and len(whole) >= ranks
    task = partial(rank_tasks.call, max_rows=5, max_new_tokens=2, batch=3)
    source = str(tmp_path / "run/export")
    (found,) = pool.run(1, task, "evaluate", source, "digits:heldout", ["packing.budget=512"], timeout=300.0)
    assert found.loss == pytest.approx(first["metrics"]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2 dp2"])
def test_ranks_begin_alike_where_masters_have_more_bits_than_the_weights(
    layout: str, pool: Pool, tmp_path: Path
) -> None:
    """bf16 weights and what completes them, loaded into fp32 ones: each rank completes its own range."""
    ranks, sizes = LAYOUTS[layout]
    more, recipe, size = model("tied", tmp_path / "model")
    keys = (*COMMON, *more, *sizes, "train.steps=2", "train.save_every=2", f"run.dir={tmp_path / 'run'}")
    pool.run(ranks, rank_tasks.train, [*keys, "engine.precision=bf16"], recipe, size, timeout=300.0)
    (tmp_path / "run/summary.json").unlink()
    wider = (*keys, "engine.precision=fp32", "run.accept_changes=[engine.precision]")
    check(pool.run(ranks, optimizer_tasks.parts, wider, recipe, size, 0, timeout=300.0))
