"""Folders in block-scaled FP8 by every way in: converted, compared, scored and trained from, they are what transformers reads.

Blocks of 2 x 2 divide every size, which transformers asks for; blocks of 16 x 16 are cut short at every edge.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import rank_tasks
from support.pool import Pool
from support.quantise import write_fp8
from support.tiny_omni import write_tiny_omni
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import same, tensors

pytestmark = pytest.mark.slow

LOGPROBS = 5e-5
Call = Callable[..., Any]


def is_plain(folder: Path) -> bool:
    return "quantization_config" not in (folder / "config.json").read_text()


@pytest.mark.parametrize("family", ["omni", "qwen35"])
def test_as_transformers_reads_it(family: str, call: Call, tmp_path: Path) -> None:
    import transformers

    if family == "omni":
        source = write_tiny_omni(tmp_path / "omni").whole
    else:
        source = write_tiny_qwen35(tmp_path / "qwen35", moe=True, mtp=1)
        single_experts(source)
    wanted = write_fp8(source, tmp_path / "fp8", (2, 2))
    call("convert", tmp_path / "fp8", tmp_path / "zoo", quiet=True)
    call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True)
    assert is_plain(tmp_path / "zoo" / "hf") and is_plain(tmp_path / "hf")
    (kind,) = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    theirs, ours = (
        getattr(transformers, kind).from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("fp8", "hf")
    )
    same(ours, theirs)
    if family == "omni":
        same(tensors(tmp_path / "hf"), wanted)
    rows = {"rows": "digits:heldout", "overrides": ("packing.budget=2048",)}
    found = call("verify", tmp_path / "fp8", tmp_path / "zoo", **rows)
    assert found["equal"] and set(found["counts"]) == {"equal"}
    compared = [row["max_difference"] for row in found["rows"] if row["skipped"] is None]
    assert len(compared) > 100 and max(compared) < LOGPROBS


def single_experts(folder: Path) -> None:
    """The decoder's experts one by one, as the FP8 folders of Qwen3.5 have them."""
    found = tensors(folder)
    for name in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        prefix = name.rpartition(".")[0]
        for expert, weight in enumerate(found.pop(name)):
            parts = {"down_proj": weight}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            found |= {f"{prefix}.{expert}.{part}.weight": t.clone() for part, t in parts.items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(found, folder / "model.safetensors", {"format": "pt"})


LAYOUTS = {1: (), 2: ("parallel.ep=2", "parallel.tp=2"), 4: ("parallel.tp=2", "parallel.pp=2", "parallel.etp=2")}


def test_stacked_experts_and_blocks_cut_short_under_any_layout(call: Call, pool: Pool, tmp_path: Path) -> None:
    """Qwen3-VL's stacks, turned as published, which transformers can't read in FP8: held to block by block."""
    source = write_tiny_qwen3_vl(tmp_path / "source", moe=True, num_hidden_layers=4)
    wanted = write_fp8(source, tmp_path / "fp8", (16, 16))
    assert any("gate_up_proj" in name for name in wanted)
    call("convert", tmp_path / "fp8", tmp_path / "zoo", quiet=True)
    call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True)
    same(tensors(tmp_path / "hf"), wanted)
    plain = scores(call("score", tmp_path / "hf", "digits:heldout", ["packing.budget=2048"]))
    for ranks, layout in LAYOUTS.items():
        overrides = ["packing.budget=2048", *layout]
        found = scores(call("score", tmp_path / "fp8", "digits:heldout", overrides, ranks=ranks))
        assert found.shape == plain.shape and float((found - plain).abs().max()) < LOGPROBS


def scores(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row["logprobs"]])


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapters"])
def test_a_run_starts_from_it_and_exports_plain_weights(rank: int, pool: Pool, tmp_path: Path) -> None:
    source = write_tiny_qwen3_vl(tmp_path / "source", num_hidden_layers=4)
    wanted = write_fp8(source, tmp_path / "fp8", (16, 16))
    run = tmp_path / "run"
    overrides = [
        f"model.init={tmp_path / 'fp8'}", "train.steps=1", "train.global_batch=2", "train.eval_rows=2", "packing.budget=512",
        "data.lookahead=4", "data.augment=0", "train.lr=1e-30", "train.min_lr=0", f"run.dir={run}", f"lora.rank={rank}",
        "parallel.tp=2",
    ]  # fmt: skip
    pool.run(2, rank_tasks.train, overrides, "qwen3_vl_sft", "tiny", timeout=300.0)
    made = run / ("base" if rank else "export")
    same(tensors(made), wanted)
    assert is_plain(made) and is_plain(run / "checkpoints" / "iter_1" / "hf")
    if rank:
        config = json.loads((run / "export" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(made.absolute())


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapters"])
def test_a_run_in_fp8_is_its_bf16_in_fp8(rank: int, call: Call, pool: Pool, tmp_path: Path) -> None:
    source, run = write_tiny_qwen3_vl(tmp_path / "source", moe=True, tied=True), tmp_path / "run"
    overrides = [
        f"model.init={source}", "train.steps=1", "train.global_batch=2", "train.eval_rows=2", "packing.budget=512",
        "data.lookahead=4", "data.augment=0", "train.lr=1e-2", f"run.dir={run}", f"lora.rank={rank}",
    ]  # fmt: skip
    pool.run(1, rank_tasks.train, overrides, "qwen3_vl_moe_sft", "tiny-moe", timeout=300.0)
    call("convert", run, tmp_path / "fp8", quiet=True, dtype="fp8")
    call("convert", run, tmp_path / "bf16", quiet=True, dtype="bf16")
    call("convert", tmp_path / "bf16", tmp_path / "again", quiet=True, dtype="fp8")
    found, wanted = ({k: v.float() for k, v in tensors(tmp_path / name).items()} for name in ("fp8", "again"))
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in wanted)
    same(found, wanted)
    assert "FP8 (e4m3)" in (tmp_path / "fp8" / "README.md").read_text()
