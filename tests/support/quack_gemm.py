"""What QuACK's grouped products compute, in plain PyTorch: in the place of `quack.gemm` where there is no GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor


class Plan(NamedTuple):
    """QuACK's plan of a product: whether it adds to the output, and the fields of its launch that zoo reads or replaces."""

    adds: bool
    max_active_clusters: int = 66
    max_swizzle_size: int = 8
    scheduler_static: Any = None


def make_scheduler_args(clusters: int, swizzle: int, semaphore: None, permutation: None) -> tuple[int, int]:
    """Stands for the function of `quack.gemm_tvm_ffi_utils`."""
    return clusters, swizzle


def gemm(
    a: Tensor, b: Tensor, out: Tensor, c: None, semaphore: None, *tile: int, add_to_output: bool, **given: Any
) -> Plan:
    """a (M, K) [at A_idx] by b (E, N, K) into out (rows, N) under cu_seqlens_m; a (M, K) [columns at A_idx] by b (N, K) into out (E, M, N) under
    cu_seqlens_k. Operands lie as the kernels want them."""
    assert c is None and semaphore is None and tile == (128, 256, 2, 1)
    plan = Plan(add_to_output)
    run_gemm_plan(plan, a, b, out, None, **given)
    return plan


def run_gemm_plan(
    plan: Plan,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    c: None,
    *,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
) -> None:
    """`gemm` again, on other operands."""
    over_rows = cu_seqlens_m is not None
    bounds = cu_seqlens_m if over_rows else cu_seqlens_k
    assert bounds is not None
    if over_rows:
        assert a.stride(-1) == 1 and out.stride(-1) == 1 and not plan.adds
    else:
        assert a.stride(-2) == 1 and b.stride(-2) == 1
    for group, (start, end) in enumerate(pairwise(bounds.tolist())):
        rows = slice(start, end) if A_idx is None else A_idx[start:end].long()
        found = a[rows] @ b[group].t() if over_rows else a[:, rows] @ b[:, start:end].t()
        target = out[start:end] if over_rows else out[group]
        target.copy_(target + found if plan.adds else found)
