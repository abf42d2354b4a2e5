"""Linears of a tower that read the same rows, as one matrix product, of widths that a GPU's matrix products take.

Rows of a tensor that are no multiple of 16 bytes take three times as long: Qwen2.5's towers have an MLP of 3,420 values in bf16. So each
linear's outputs are followed by as many columns of zeros as are missing, and so may be the rows that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.kernels import weight_gradient

MULTIPLE = 8  # values of half precision in 16 bytes


def joinable(*linears: Any) -> bool:
    """Whether `joined` does what linears do: PyTorch's own, without an adapter or another hook."""
    return all(isinstance(linear, torch.nn.Linear) and not linear._forward_hooks for linear in linears)


def joined(x: Tensor, *linears: Any) -> Tensor:
    """x (N, in) or with columns of zeros behind -> (N, widths), what each linear gives and zeros up to a `MULTIPLE`, side by side.

    For tensors that zoo's kernels take (`zoo.nn.kernels.fused`), N and all widths above zero. Kept for the backward pass: x and the weights.
    """
    out: Tensor = _Joined.apply(x, *(one for linear in linears for one in (linear.weight, linear.bias)))
    return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.of_biases = [None if bias is None else bias.dtype for bias in biases]
        return F.linear(x, _stacked(weights, x.shape[1]), _stacked_biases(weights, biases))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.nn.kernels.functions import column_sums

        x, *weights = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad
        of_x = grad @ _stacked(weights, x.shape[1]) if needs_x else None
        sums = column_sums(grad) if any(needed[1::2]) else None
        found: list[Tensor | None] = []
        start = 0
        for place, weight in enumerate(weights):
            mine = slice(start, start + len(weight))
            start += _whole(len(weight))
            needs_weight, needs_bias = needed[2 * place : 2 * place + 2]
            rows = x[:, : weight.shape[1]]
            found.append(weight_gradient(weight, grad[:, mine], rows) if needs_weight else None)
            found.append(sums[mine].to(ctx.of_biases[place]) if needs_bias and sums is not None else None)
        return of_x, *found


def _whole(width: int) -> int:
    return width + -width % MULTIPLE


def _stacked(weights: Sequence[Any], width: int) -> Tensor:
    """Weights (out, in) one below the other, (widths, `width`), with rows and columns of zeros."""
    whole = [F.pad(w, (0, width - w.shape[1], 0, -len(w) % MULTIPLE)) for w in weights]
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def _stacked_biases(weights: Sequence[Any], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    whole = [
        F.pad(w.new_zeros(len(w)) if bias is None else bias, (0, -len(w) % MULTIPLE))
        for w, bias in zip(weights, biases, strict=True)
    ]
    return whole[0] if len(whole) == 1 else torch.cat(whole)
