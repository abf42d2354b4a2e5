"""Linears of a tower that read the same rows, as one matrix product, of widths that a GPU's matrix products take.

A product takes three times as long where a row of a tensor is no multiple of 16 bytes, as in Qwen2.5's towers, whose MLP is 3,420 values wide.
So columns of zeros follow the outputs of each linear up to such a multiple, and may follow the rows that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels import bias_gradient, weight_gradient

MULTIPLE = 8  # values of half precision in 16 bytes


def joinable(*linears: torch.nn.Module) -> bool:
    """Whether `joined` can stand in for linears: they are PyTorch's own, and no adapter or other hook changes what they give."""
    return all(isinstance(linear, torch.nn.Linear) and not linear._forward_hooks for linear in linears)


def joined(x: Tensor, *linears: torch.nn.Linear) -> Tensor:
    """The outputs of linears side by side, each followed by columns of zeros up to a `MULTIPLE`.

    The backward pass keeps x and the weights.

    Args:
        x: (N, width), where columns of zeros may follow the `in` values that the linears read.
        linears: (out, in) each, with a bias or without.

    Returns:
        (N, sum of each `out` rounded up to a `MULTIPLE`).
    """
    return _Joined.apply(x, *(parameter for linear in linears for parameter in (linear.weight, linear.bias)))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, *parameters: Tensor | None) -> Tensor:
        weights, biases = [weight for weight in parameters[::2] if weight is not None], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        return F.linear(x, _stacked(weights, x.shape[1]), _end_to_end(weights, biases))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad
        of_x = grad @ _stacked(weights, x.shape[1]) if needs_x else None
        of_biases = bias_gradient(grad) if any(needed[1::2]) else grad.new_empty(grad.shape[1])
        of_parameters: list[Tensor | None] = []
        for weight, columns, *needs in zip(weights, _places(weights), needed[::2], needed[1::2], strict=True):
            of_parameters.append(weight_gradient(weight, grad[:, columns], x) if needs[0] else None)
            of_parameters.append(of_biases[columns] if needs[1] else None)
        return of_x, *of_parameters


def _places(weights: Sequence[Tensor]) -> list[slice]:
    """The columns of each linear's output."""
    starts = accumulate((_whole(len(w)) for w in weights[:-1]), initial=0)
    return [slice(start, start + len(w)) for start, w in zip(starts, weights, strict=True)]


def _width(weights: Sequence[Tensor]) -> int:
    """The columns of all outputs."""
    return sum(_whole(len(w)) for w in weights)


def _whole(count: int) -> int:
    return count + -count % MULTIPLE


def _stacked(weights: Sequence[Tensor], width: int) -> Tensor:
    """Weights (out, in) one below the other, with rows and columns of zeros: (output columns, `width`)."""
    if len(weights) == 1 and weights[0].shape == (_width(weights), width):
        return weights[0]
    whole = weights[0].new_zeros(_width(weights), width)
    for weight, columns in zip(weights, _places(weights), strict=True):
        whole[columns, : weight.shape[1]] = weight
    return whole


def _end_to_end(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Biases (out,) of the linears that have one, zeros elsewhere: (output columns,)."""
    if all(bias is None for bias in biases):
        return None
    whole: Tensor = weights[0].new_zeros(_width(weights))
    for bias, columns in zip(biases, _places(weights), strict=True):
        if bias is not None:
            whole[columns] = bias
    return whole
