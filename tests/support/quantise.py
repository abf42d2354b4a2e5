"""Checkpoints in block-scaled FP8, as Qwen publishes them, made of plain ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEARS = re.compile(r".*\blayers\.\d+\.(self_attn|linear_attn|mlp)\..*_proj(_qkvz|_qkv|_z)?(\.weight)?")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise(weight: Tensor, block: tuple[int, int], scale: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """(..., R, C) as float8_e4m3fn and the factors of its blocks, one matrix and one block after the other."""
    if weight.ndim > 2:
        parts = [quantise(one, block, scale) for one in weight]
        return torch.stack([raw.view(torch.uint8) for raw, _ in parts]).view(torch.float8_e4m3fn), torch.stack(
            [factors for _, factors in parts]
        )
    rows, columns = weight.shape
    raw = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-rows // block[0]), -(-columns // block[1]), dtype=scale)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            factors[i, j] = weight[place].float().abs().amax() / LARGEST
            raw[place] = (weight[place].float() / factors[i, j].float()).clamp(-LARGEST, LARGEST)
    return raw, factors


def plain(raw: Tensor, factors: Tensor, block: tuple[int, int]) -> Tensor:
    """What `quantise` gave in bf16, block by block."""
    if raw.ndim > 2:
        return torch.stack([plain(*pair, block) for pair in zip(raw, factors, strict=True)])
    result = torch.empty(raw.shape, dtype=torch.bfloat16)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            result[place] = (raw[place].float() * factors[i, j].float()).to(torch.bfloat16)
    return result


def write_fp8(source: Path, folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """A folder in FP8 out of a plain one; returns what its tensors are in bf16, block by block."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if LINEARS.fullmatch(name) and tensor.ndim > 1:
                raw, factors = quantise(tensor, block)
                stored |= {name: raw, f"{name}_scale_inv": factors}
                wanted[name] = plain(raw, factors, block)
            else:
                stored[name] = wanted[name] = tensor.to(torch.bfloat16)
    assert any(name.endswith("_scale_inv") for name in stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    state(folder, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*block],
                   "modules_to_not_convert": ["lm_head"]})  # fmt: skip
    return wanted


def state(folder: Path, how: object, key: str = "quantization_config") -> None:
    """Have a folder's config.json say how it is quantised, in bf16 else."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {"model_type": "m"}
    path.write_text(json.dumps({**config, key: how, "dtype": "bfloat16"}))
