"""Fused Triton kernels for the operations between matrix products: norms and sums, GELU, rotary, SwiGLU, cross entropy.

Plain PyTorch makes five to ten passes over memory for each of these and keeps fp32 copies for the backward pass. Every
kernel here makes one pass each way, computes in fp32 and rounds once. They serve half precision on a GPU; everything
else (CPU, fp32) takes the plain operations that stand beside each call, and which the kernels are tested against.

Triton comes with PyTorch where there are GPUs; nothing is compiled at install.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor


def fused(x: Tensor) -> bool:
    """Whether the kernels take this tensor: half precision on a GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
