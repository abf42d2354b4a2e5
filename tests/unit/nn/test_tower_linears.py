"""Linears of a tower joined in one product, against each by itself: what comes out, and all gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.towers.linears import joinable, joined

ROWS, WIDTH = 5, 16


def linears(*outs: int, width: int = WIDTH, bias: bool = True) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(width, out, bias=bias, dtype=torch.float64) for out in outs]


def apart(x: Tensor, parts: list[torch.nn.Linear]) -> Tensor:
    """What `joined` gives, by PyTorch's own calls."""
    read = x[:, : parts[0].in_features]
    return torch.cat([F.pad(part(read), (0, -part.out_features % 8)) for part in parts], dim=1)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outs", [(8,), (11,), (11, 11), (16, 3, 8)])
def test_joined_linears_are_those_linears(outs: tuple[int, ...], bias: bool) -> None:
    parts = linears(*outs, bias=bias)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(parameter for part in parts for parameter in part.parameters())]
    found, wanted = joined(x, *parts), apart(x, parts)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(gradients(found, *inputs), gradients(wanted, *inputs), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


def test_rows_with_zeros_behind_and_a_linear_without_bias_beside_one_with() -> None:
    with_bias, without = linears(6, width=11)[0], linears(6, width=11, bias=False)[0]
    x = F.pad(torch.randn(ROWS, 11, dtype=torch.float64), (0, 5)).requires_grad_()
    inputs = x, with_bias.weight, with_bias.bias, without.weight
    parts = [with_bias, without]
    found, wanted = joined(x, *parts), apart(x, parts)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(gradients(found, *inputs), gradients(wanted, *inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("behind", [0, 5])
def test_gradients_of_weights_are_added_to_ddps_buffer_and_frozen_ones_get_none(behind: int) -> None:
    added, frozen = linears(11, 11, width=WIDTH - behind)
    x = F.pad(torch.randn(ROWS, WIDTH - behind, dtype=torch.float64), (0, behind)).requires_grad_()
    (wanted,) = gradients(apart(x, [added, frozen]), added.weight)
    weight: Any = added.weight
    weight.adds_products, weight.main_grad = True, torch.ones_like(weight)
    frozen.requires_grad_(False)
    gradients(joined(x, added, frozen), weight)
    torch.testing.assert_close(weight.main_grad, 1.0 + wanted)
    assert weight.grad_added_to_main_grad


def test_a_linear_with_a_hook_or_of_another_kind_is_not_joined() -> None:
    one, other = linears(8, 8)
    assert joinable(one, other)
    other.register_forward_hook(lambda *_: None)
    assert not joinable(one, other)
    assert not joinable(one, torch.nn.Identity())
