"""Versions and the GPU of this machine, on which the result of a check depends."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from zoo.packages import installed_version

# Name shown -> distributions of that name.
PACKAGES = {
    "zoo": ("zoo-train",),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine", "transformer_engine_torch"),
    "flash-linear-attention": ("flash-linear-attention", "fla-core"),
    "flash-qla": ("flash-qla",),
    "tilelang": ("tilelang",),
    "triton": ("triton",),
    "flash-attn": ("flash-attn-4", "flash-attn"),
    "quack": ("quack-kernels",),
    "cutlass-dsl": ("nvidia-cutlass-dsl",),
}


def machine() -> dict[str, str]:
    """Name to version of Python, the libraries that bring kernels, and the GPU; "-" for what is not installed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: installed_version(*names) or "-" for name, names in PACKAGES.items()}
    if not torch.cuda.is_available():
        return versions | {"device": f"CPU ({platform.machine()})"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "-"
    versions |= {"cuda": torch.version.cuda or "-", "driver": _driver(), "cudnn": _cudnn(), "nccl": nccl}
    capability, memory = f"{properties.major}.{properties.minor}", f"{properties.total_memory / 2**30:.1f} GiB"
    return versions | {"device": properties.name, "capability": capability, "memory": memory}


def _driver() -> str:
    """The driver's version as it says itself."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "-"
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else "-"


def _cudnn() -> str:
    """cuDNN's version; PyTorch's message where it was built for another, as a Transformer Engine may bring one."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:
        return str(error).split(". ")[0]
