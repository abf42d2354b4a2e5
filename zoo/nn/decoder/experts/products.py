"""Grouped matrix products without autograd: each row by the weight of its expert, and gradients of the weights.

On Hopper they are QuACK's, where it is installed (zoo.nn.decoder.experts.hopper). Else a product is one `torch.nn.functional.grouped_mm`
on a GPU in half precision, for widths that it takes, and a loop over the local experts elsewhere (its CPU kernel would loop as well).

Rows may be gathered: `rows` (N,) int32 are those of x (M, in) that are meant. QuACK's kernels gather as they read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.decoder.experts import hopper
from zoo.nn.decoder.experts.exchange import gather_rows
from zoo.nn.kernels import fused
from zoo.nn.kernels.widths import grouped_takes


def grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether x (N, in) by weight (E, out, in) is one `grouped_mm`: a GPU, half precision, widths that it takes."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and grouped_takes(*weight.shape[1:])


def gathered(x: Tensor, rows: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """x and the rows that products with this weight, and their gradients, take of it; where kernels don't gather, what is meant itself and None."""
    if rows is None or hopper.supports(x, weight, len(rows)):
        return x, rows
    return gather_rows(x, rows), None


def multiply(x: Tensor, weight: Tensor, bounds: Tensor, rows: Tensor | None = None, free_sms: int = 0) -> Tensor:
    """The grouped product of x (M, in) and weight (E, out, in) -> (N, out).

    Args:
        bounds: (E + 1,) int32, where the rows of each expert begin, and where the last ones end: N.
        rows: (N,) int32, of x; None: all, N = M.
        free_sms: multiprocessors (SMs) that QuACK's kernels leave free for a collective beside them.
    """
    if hopper.supports(x, weight, len(x if rows is None else rows)):
        return hopper.multiply(x, weight, bounds, rows, free_sms)
    if rows is not None:
        x = gather_rows(x, rows)
    if grouped(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=bounds[1:])
    return torch.cat([F.linear(part, weight[e]) for e, part in enumerate(x.split(_counts(bounds)))])


def weight_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bounds: Tensor,
    total: Tensor | None = None,
    rows_of_grad: Tensor | None = None,
    rows_of_x: Tensor | None = None,
    free_sms: int = 0,
) -> Tensor:
    """The gradient (E, out, in) of a weight: each expert's grad^T x.

    Args:
        grad: (M, out), of the product.
        x: (M', in), which was multiplied.
        weight: (E, out, in).
        bounds: as of `multiply`.
        total: (E, out, in), where the gradient is added; what is returned has no meaning then.
        rows_of_grad, rows_of_x: (N,) int32, of either; None: all.
        free_sms: as of `multiply`.
    """
    if rows_of_grad is not None and rows_of_x is not None:  # QuACK gathers one operand
        x, rows_of_x = gather_rows(x, rows_of_x), None
    if hopper.supports(x, weight, len(grad if rows_of_grad is None else rows_of_grad)):
        gradient = hopper.weight_gradient(grad, x, total, bounds, rows_of_grad, rows_of_x, free_sms)
        return gradient if total is None else torch.empty_like(weight)
    grad = grad if rows_of_grad is None else gather_rows(grad, rows_of_grad)
    x = x if rows_of_x is None else gather_rows(x, rows_of_x)
    if grouped(grad, weight):
        gradient = F.grouped_mm(grad.t(), x, offs=bounds[1:])
    else:
        counts = _counts(bounds)
        parts = zip(grad.split(counts), x.split(counts), strict=True)
        gradient = torch.stack([g.t() @ rows for g, rows in parts])
    if total is not None:
        accumulate(total, gradient)
    return gradient


def accumulate(total: Tensor, grad: Tensor) -> None:
    """total += grad, of the same shape; grad may have half the precision."""
    if fused(grad) and total.dtype == torch.float32:
        from zoo.nn.kernels.experts import accumulate as kernel

        kernel(total, grad)
    else:
        total.add_(grad)


def _counts(bounds: Tensor) -> list[int]:
    """Rows of each expert; the host waits for them."""
    return bounds.diff().tolist()
