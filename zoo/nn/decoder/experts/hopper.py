"""Grouped matrix products on Hopper by QuACK (Dao et al., quack-kernels), which FlashAttention 4 brings along.

On an H200, at the widths of Qwen3-VL-30B-A3B and some 2,500 rows for each of 32 experts, a product takes 4 to 13 % less time than PyTorch's
`grouped_mm`, the gradient of a weight that is added to a sum 18 %. Where rows are gathered from tokens, which these kernels do as they read
them, it is 20 to 34 % with the gathering. Results were those of `grouped_mm` bit for bit. The host takes half as long for a call.

The functions used are the ones below QuACK's public interface: that one keeps a plan for each shape that it meets, and experts get another
number of rows at each call. So one version is taken, the one that this was checked with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.nn.kernels.widths import quack_takes
from zoo.packages import installed_version

if TYPE_CHECKING:
    from quack.gemm import GemmPlan

VERSION = "0.6.5"
# The fastest of 14, or within 6 % of it, for each of these products. Two programs of a cluster share what they read of a weight.
TILE_ROWS, TILE_COLUMNS, CLUSTER = 128, 256, 2
MOST = 2**31  # elements of an operand that places are counted for in 32 bits

_plans: dict[tuple[object, ...], GemmPlan] = {}  # compiled kernels, which take any number of rows


@lru_cache(maxsize=8)
def is_there(device: torch.device) -> bool:
    """Whether this version of QuACK is installed, and the GPU is one that it was checked on."""
    return installed_version("quack-kernels") == VERSION and torch.cuda.get_device_capability(device) == (9, 0)


def supports(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Whether products of x (M, in) and weight (E, out, in) with so many rows, and their gradients, go this way."""
    widths = weight.shape[1:]
    if not (x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and quack_takes(*widths)):
        return False
    return max(weight.numel(), max(rows, len(x)) * max(widths)) < MOST and is_there(x.device)


def multiply(x: Tensor, weight: Tensor, bounds: Tensor, rows: Tensor | None, free_sms: int) -> Tensor:
    """See `products.multiply`."""
    out = x.new_empty(len(x if rows is None else rows), weight.shape[1])
    if len(out):
        _launch(x, weight, out, rows, {"cu_seqlens_m": bounds}, add=False, free_sms=free_sms)
    return out


def weight_gradient(
    grad: Tensor,
    x: Tensor,
    total: Tensor | None,
    bounds: Tensor,
    rows_of_grad: Tensor | None,
    rows_of_x: Tensor | None,
    free_sms: int,
) -> Tensor:
    """See `products.weight_gradient`; at most one of the two is gathered."""
    out = total
    if out is None:
        out = grad.new_empty(len(bounds) - 1, grad.shape[1], x.shape[1])
    over = {"cu_seqlens_k": bounds}
    if not len(grad) or not len(x):
        return out if total is not None else out.zero_()
    if rows_of_x is None:
        _launch(grad.t(), x.t(), out, rows_of_grad, over, add=total is not None, free_sms=free_sms)
    else:  # the first operand is the one that can be gathered
        assert rows_of_grad is None
        _launch(x.t(), grad.t(), out.mT, rows_of_x, over, add=total is not None, free_sms=free_sms)
    return out


def _launch(
    a: Tensor, b: Tensor, out: Tensor, rows: Tensor | None, over: dict[str, Tensor], *, add: bool, free_sms: int
) -> None:
    """out = a b^T, or += if `add`, of a (M, K) and b (E, N, K) for rows in groups, or a (M, K), b (N, K) and out (E, M, N) for K in groups."""
    from quack.gemm import gemm, run_gemm_plan

    layout = *(operand.stride(-1) == 1 for operand in (a, b, out)), *over, rows is not None, add
    key = *layout, free_sms, out.dtype, out.device
    plan = _plans.get(key)
    if plan is not None:
        run_gemm_plan(plan, a, b, out, None, A_idx=rows, **over)
        return
    plan = gemm(a, b, out, None, None, TILE_ROWS, TILE_COLUMNS, CLUSTER, 1, A_idx=rows, add_to_output=add, **over)
    _plans[key] = _leaving_free(plan, free_sms) if free_sms else plan


def _leaving_free(plan: GemmPlan, sms: int) -> GemmPlan:
    """The plan on so many multiprocessors (SMs) less. A program keeps its SM until the product ends, and there is one for each SM else."""
    from quack.gemm_tvm_ffi_utils import make_scheduler_args

    clusters = plan.max_active_clusters - sms // CLUSTER
    scheduler = make_scheduler_args(clusters, plan.max_swizzle_size, None, None)
    return plan._replace(max_active_clusters=clusters, scheduler_static=scheduler)
