"""Functions within kernels, in fp32 registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in five instructions, where `tl.sigmoid` takes twelve; two roundings more than its own."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))  # of an infinity too: 0
    return root * root
