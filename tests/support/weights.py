"""Weights of a checkpoint, and exports of them, for tests that carry them in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.engine import Zoo


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a small checkpoint."""
    from safetensors.torch import load_file

    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def export(zoo: Zoo, folder: Path, source: Path | None, **options: Any) -> Path:
    """zoo's model as a Hugging Face folder."""
    from zoo.bridge import export_hf
    from zoo.model.build import model_dims

    bridge = zoo.assembly.family.load("bridge")
    return export_hf([zoo.model], folder, bridge, model_dims(zoo.assembly), source=source, **options)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names that are on one side alone, or whose tensors are not equal to the bit."""
    both = found.keys() & wanted.keys()
    unequal = {name for name in both if not found[name].equal(wanted[name])}
    return sorted((found.keys() ^ wanted.keys()) | unequal)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert that names, dtypes and values are equal, these to the bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=f"{name}: {{}}".format)
