"""Runs of folders that have parameters in fp32 among bf16 ones: training, saves, resumes, exports and conversions keep them in fp32."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_tasks
from support.pool import Pool
from support.tiny import rewrite
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import same, tensors
from torch import Tensor

COMMON = (
    *rank_tasks.ADAMW, "train.global_batch=4", "train.warmup_steps=0", "train.lr=1e-2", "train.eval_rows=3", "train.keep=9", "train.steps=4",
    "train.save_every=2", "data.lookahead=8", "data.augment=0", "packing.budget=512", "packing.align=4", "log.tensorboard=false",
    "log.predictions=0", "engine.precision=bf16",
)  # fmt: skip
LAYOUTS = {
    "alone": (1, ()),
    "dp2, gradients in bf16": (2, ("train.main_grads_dtype=bf16",)),
    "pp2 tp2": (4, ("parallel.pp=2", "parallel.tp=2")),
    "ep2 on the host": (2, ("parallel.ep=2", "train.optimizer_offload_fraction=0.5", "train.exp_avg_dtype=fp8")),
    "cp2 muon": (2, ("parallel.cp=2", "train.optimizer=muon")),
}
PUBLISHED = ("linear_attn.A_log", "linear_attn.norm.weight")


def mixed(folder: Path, *, every: bool, **model: Any) -> Path:
    """A tiny Qwen3.5 in bf16, with what is published in fp32 so; or, with `every`, each second tensor, the embedding among them."""
    write_tiny_qwen35(folder, **model)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        second = {name for place, name in enumerate(sorted(tensors)) if place % 2 or "embed_tokens" in name}
        return {
            name: one * 1.0017 if (name in second if every else name.endswith(PUBLISHED)) else one.bfloat16()
            for name, one in tensors.items()
        }

    rewrite(folder, change)
    return folder


def has_more_digits(tensor: Tensor) -> bool:
    return not torch.equal(tensor, tensor.bfloat16().float())


def check_export(found: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Names and dtypes are those of the start; what was in fp32 has moved, and has more digits than bf16 has."""
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in stored.items()}
    wide = {name for name, one in stored.items() if one.dtype == torch.float32}
    moved = {name for name in wide if not torch.equal(found[name], stored[name])}
    always = {name for name in wide if ".experts." not in name}  # an expert may have had no token
    assert len(moved & always) > 0.9 * len(always) > 0
    assert all(has_more_digits(found[name]) for name in moved)


def run(pool: Pool, source: Path, folder: Path, layout: str, *more: str, resumes: bool = True) -> None:
    ranks, sizes = LAYOUTS[layout]
    keys = [*COMMON, *sizes, *more, f"model.init={source}", "export=true", f"run.dir={folder / 'run'}"]
    recipe = ("qwen35_vl_moe_sft", "tiny-moe") if "ep2" in layout else ("qwen35_vl_sft", "tiny")

    def train() -> tuple[Any, dict[str, bytes], dict[str, Tensor]]:
        result = pool.run(ranks, rank_tasks.train, keys, *recipe, timeout=300.0)[0]
        last = folder / "run/checkpoints/iter_4"
        files = {path.name: path.read_bytes() for path in last.glob("*.bin")}
        return result, files, {k: v.clone() for k, v in tensors(folder / "run/export").items()}

    first, whole, found = train()
    check_export(found, tensors(source))
    if resumes:
        shutil.rmtree(folder / "run/checkpoints/iter_4")
        shutil.rmtree(folder / "run/export")
        (folder / "run/summary.json").unlink()
        second, again, back = train()
        assert first["losses"] == second["losses"] and whole == again
        same(back, found)

    def call(name: str, *arguments: str, **options: Any) -> Any:
        return pool.run(1, partial(rank_tasks.call, **options), name, *arguments, timeout=300.0)[0]

    call("convert", str(folder / "run"), str(folder / "converted"), quiet=True)
    converted = tensors(folder / "converted")
    assert all(one.dtype == found[name].dtype for name, one in converted.items())
    wide = [name for name, one in found.items() if one.dtype == torch.float32]
    for name in wide:
        torch.testing.assert_close(converted[name], found[name], rtol=0, atol=0)


def test_a_run_and_its_exports(pool: Pool, tmp_path: Path) -> None:
    source = mixed(tmp_path / "model", every=False)
    run(pool, source, tmp_path, "alone", "train.steps=2", resumes=False)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True], ids=["as published", "every second tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_resumes_and_exports(layout: str, every: bool, pool: Pool, tmp_path: Path) -> None:
    model = {"moe": True, "mtp": 1} if "ep2" in layout else {"tied": True}
    run(pool, mixed(tmp_path / "model", every=every, **model), tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["model", "fp8"])
def test_adapters_leave_the_others_bytes_alone(base: str, pool: Pool, tmp_path: Path) -> None:
    source = mixed(tmp_path / "model", every=True)
    keys = [*COMMON, f"model.init={source}", "lora.rank=4", "lora.targets=q_proj", f"lora.base_dtype={base}"]
    keys += ["export=false", f"run.dir={tmp_path / 'run'}"]
    pool.run(2, rank_tasks.train, keys, "qwen35_vl_sft", "tiny", timeout=300.0)
    task = partial(rank_tasks.call, quiet=True)
    pool.run(1, task, "convert", str(tmp_path / "run"), str(tmp_path / "merged"), timeout=300.0)
    stored, found = tensors(source), tensors(tmp_path / "merged")
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in stored.items()}
    changed = {name for name, one in found.items() if not torch.equal(one, stored[name])}
    assert changed and all(name.endswith("q_proj.weight") for name in changed)


@pytest.mark.slow
def test_random_weights_are_held_as_the_family_publishes_them(pool: Pool, tmp_path: Path) -> None:
    """And stay so in a run that starts from that one's checkpoint."""
    keys = [*COMMON, "export=true"]
    task, about = rank_tasks.train, ("qwen35_vl_sft", "tiny")
    pool.run(2, task, [*keys, f"run.dir={tmp_path / 'one'}"], *about, timeout=300.0)
    further = [*keys, f"model.init={tmp_path / 'one'}", f"run.dir={tmp_path / 'two'}"]
    pool.run(1, task, further, *about, timeout=300.0)
    one, two = (tensors(tmp_path / name / "export") for name in ("one", "two"))
    for found in (one, two):
        wide = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
        assert wide == {name for name in found if name.endswith(PUBLISHED)} and wide
        assert all(has_more_digits(found[name]) for name in wide)
    assert any(not torch.equal(one[name], two[name]) for name in one)
