"""Folders in block-scaled FP8: what families publish under -FP8, as transformers and zoo read it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantise import LINEARS, plain, quantise
from support.tiny import ROPE, rewrite
from support.tiny_llava import write_tiny_llava
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_next import write_tiny_qwen3_next
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen35 import write_tiny_qwen35, write_tiny_qwen35_text
from support.weights import same, tensors
from torch import Tensor

from zoo.errors import UserError
from zoo.tools.convert import convert

BLOCK = (128, 128)
SIZES = {"num_attention_heads": 4, "head_dim": 64, "intermediate_size": 384}
SINGLE = {"hidden_size": 256, "rope_parameters": ROPE, **SIZES}
SEEING = {"rope_parameters": ROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}, **SIZES}
SPARSE = {"moe_intermediate_size": 128}
HYBRID = {
    **SIZES, "linear_key_head_dim": 32, "linear_value_head_dim": 32, **SPARSE, "shared_expert_intermediate_size": 256,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}  # fmt: skip
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen3": (write_tiny_qwen3, {**SINGLE, "tied": True}),
    "qwen3_moe": (write_tiny_qwen3, {**SINGLE, **SPARSE, "moe": True}),
    "qwen3_vl": (write_tiny_qwen3_vl, SEEING),
    "qwen3_vl_moe": (write_tiny_qwen3_vl, {**SEEING, **SPARSE, "moe": True}),
    "qwen35_moe": (write_tiny_qwen35, {**HYBRID, "moe": True, "mtp": 1, "stacked": True}),
    "qwen35_text": (write_tiny_qwen35_text, {**HYBRID, "moe": True, "mtp": 1}),
    "qwen3_next": (write_tiny_qwen3_next, {**HYBRID, "mtp": 1}),
}
PLAIN = re.compile(
    r"lm_head|.*(norm|embed|visual|mlp\.gate\b|shared_expert_gate|conv1d|A_log|dt_bias|in_proj_(a|b|ba)\b|mtp\.fc).*"
)


def published(source: Path) -> dict[str, Tensor]:
    """The tensors of a folder in bf16, experts of Qwen3.5 one by one."""
    tensors_by_name: dict[str, Tensor] = {}
    for name, tensor in tensors(source).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and "linear_attn" in str(
            tensors(source).keys()
        ):
            for expert, weight in enumerate(tensor):
                parts = {"down_proj": weight}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
                prefix = name.rpartition(".")[0]
                tensors_by_name |= {f"{prefix}.{expert}.{part}.weight": t for part, t in parts.items()}
        else:
            tensors_by_name[name] = tensor
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors_by_name.items()}


def in_fp8(source: Path, scale: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the folder should hold in FP8, and its tensors in bf16 again."""
    stored, read = {}, {}
    for name, tensor in published(source).items():
        if LINEARS.fullmatch(name) and tensor.ndim > 1:
            raw, factors = quantise(tensor, BLOCK, scale)
            stored |= {name: raw, f"{name}_scale_inv": factors}
            read[name] = plain(raw, factors, BLOCK)
        else:
            stored[name] = read[name] = tensor
    return stored, read


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    same({k: v.view(torch.uint8) if v.dtype.itemsize == 1 else v for k, v in found.items()},
         {k: v.view(torch.uint8) if v.dtype.itemsize == 1 else v for k, v in wanted.items()})  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_is_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    import transformers

    write, sizes = MODELS[kind]
    source = write(tmp_path / "source", **sizes)
    stored, read = in_fp8(source, torch.float32 if kind == "qwen3_next" else torch.bfloat16)
    convert(source, tmp_path / "fp8", dtype="fp8", quiet=True)
    equal(tensors(tmp_path / "fp8"), stored)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    told = config["quantization_config"]
    assert {key: told[key] for key in ("quant_method", "activation_scheme", "fmt", "weight_block_size")} == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    }  # fmt: skip
    left = told["modules_to_not_convert"]
    modules = {
        re.sub(r"\.(weight|bias)$", "", name)
        for name in stored
        if name + "_scale_inv" not in stored and "_scale_inv" not in name
    }
    assert set(left) == modules | {"lm_head"} and all(PLAIN.fullmatch(name) for name in left)

    convert(tmp_path / "fp8", tmp_path / "zoo", quiet=True)
    convert(tmp_path / "zoo", tmp_path / "bf16", quiet=True)
    same(tensors(tmp_path / "bf16"), read)
    convert(source, tmp_path / "native", quiet=True)
    convert(tmp_path / "native", tmp_path / "again", dtype="fp8", quiet=True)
    equal(tensors(tmp_path / "again"), stored)
    if kind == "qwen3_vl_moe":  # transformers reads no stack of experts in FP8, of published folders neither
        return
    (name,) = config["architectures"]
    theirs, ours, exact = (
        getattr(transformers, name).from_pretrained(tmp_path / folder, dtype=torch.bfloat16).eval()
        for folder in ("fp8", "bf16", "source")
    )
    same(theirs.state_dict(), ours.state_dict())
    with torch.no_grad():
        ids = torch.randint(20, 300, (2, 40), generator=torch.Generator().manual_seed(0))
        logits, wanted = (model.float()(input_ids=ids).logits for model in (theirs, exact))
    assert 0 < float((logits - wanted).std() / wanted.std()) < 0.3  # where rounding turns the choice of an expert, too


@pytest.mark.parametrize(
    ("sizes", "value", "message"),
    [
        ({"intermediate_size": 192}, 0.0, r"mlp\.gate_proj\.weight \[192, 44\].* multiples of 128.*dtype=bf16"),
        ({}, torch.nan, r"model\.layers\.1\.mlp\.up_proj\.weight has values that are no numbers"),
        ({}, -torch.inf, r"model\.layers\.1\.mlp\.up_proj\.weight has values that are no numbers"),
    ],
)
def test_what_readers_would_take_for_something_else_is_refused(
    sizes: dict[str, int], value: float, message: str, tmp_path: Path
) -> None:
    source = write_tiny_qwen3(tmp_path / "source", **sizes)

    def spoil(saved: dict[str, Tensor]) -> dict[str, Tensor]:
        saved["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        return saved

    rewrite(source, spoil)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "fp8", dtype="fp8", quiet=True)
    assert not (tmp_path / "fp8").exists()


def test_blocks_of_zeros_stay_zero(tmp_path: Path) -> None:
    source = write_tiny_qwen3(tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(source, lambda saved: {**saved, name: torch.zeros_like(saved[name])})
    convert(source, tmp_path / "fp8", dtype="fp8", quiet=True)
    found = tensors(tmp_path / "fp8")
    assert not found[name].float().any() and found[f"{name}_scale_inv"].tolist() == [[1.0]]


def test_families_and_sources_that_have_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model_type llava is not published in FP8.*qwen3_vl.*dtype=bf16"):
        convert(write_tiny_llava(tmp_path / "llava"), tmp_path / "out", dtype="fp8", quiet=True)
    convert(write_tiny_qwen3(tmp_path / "qwen3"), tmp_path / "fp8", dtype="fp8", quiet=True)
    with pytest.raises(UserError, match="is quantised already"):
        convert(tmp_path / "fp8", tmp_path / "out", dtype="fp8", quiet=True)
    with pytest.raises(UserError, match="allow with dtype=fp8"):
        convert(tmp_path / "qwen3", tmp_path / "out", dtype="fp8", allow="x", quiet=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="an adapter, without the weights"):
        convert(tmp_path / "adapter", tmp_path / "out", dtype="fp8", quiet=True)
    assert not (tmp_path / "out").exists()
