"""Frozen weights in FP8: what a block keeps, and that modules compute and differentiate with the dense weight alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.frozen_fp8 import DTYPE, Quantised, dense_weight, freeze


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 256), (5, 130), (2, 7, 96)], ids=str)
def test_values_are_near_and_exact_in_bf16(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-6, 6, shape[-1])
    weight[0] = 0.0
    weight = weight.to(dtype)
    found = Quantised.from_weight(weight)
    assert found.codes.dtype == DTYPE and found.codes.shape == shape and found.scales.shape[-1] == -(-shape[-1] // 128)
    assert bool((found.codes.float().abs() <= 448).all())
    dense = found.dense()
    assert dense.dtype == dtype
    torch.testing.assert_close(dense.bfloat16().to(dtype), dense, rtol=0, atol=0)
    error, size = (dense - weight).float().abs(), weight.float().abs()
    for start in range(0, shape[-1], 128):
        block = (..., slice(start, start + 128))
        largest = size[block].amax(-1, keepdim=True)
        assert bool((error[block] <= torch.maximum(size[block] / 16, largest * 2.0**-17)).all())
    torch.testing.assert_close(Quantised.from_weight(dense).dense(), dense, rtol=0, atol=0)


def test_half_of_a_matrix_has_the_same_values() -> None:
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(0))
    whole = Quantised.from_weight(weight).dense()
    torch.testing.assert_close(Quantised.from_weight(weight[1:4]).dense(), whole[1:4], rtol=0, atol=0)
    torch.testing.assert_close(Quantised.from_weight(weight[:, 256:]).dense(), whole[:, 256:], rtol=0, atol=0)


class Experts(torch.nn.Module):
    """Two stacked weights, one of them read transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = torch.nn.Parameter(torch.randn(3, 40, 64))
        self.weight2 = torch.nn.Parameter(torch.randn(3, 64, 40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.weight1.transpose(1, 2)).relu(), self.weight2.transpose(1, 2))


@pytest.mark.parametrize("module", [torch.nn.Linear(64, 48), Experts()], ids=["linear", "experts"])
def test_a_module_computes_with_the_dense_weight_and_keeps_none(module: Any) -> None:
    names = [name for name, one in module.named_parameters() if one.ndim > 1]
    plain = {name: torch.nn.Parameter(Quantised.from_weight(getattr(module, name)).dense()) for name in names}
    module.requires_grad_(False)
    before = dict(module.named_parameters())
    freeze(module, names)
    assert dict(module.named_parameters()) == before  # the same objects
    assert all(before[name].dtype == DTYPE for name in names)
    x = torch.randn(3, 5, 64, requires_grad=True)
    weights = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: weights.append(one) or one, lambda one: one):
        found = module(x)
    assert not any(one.shape[-2:] in ((64, 40), (40, 64), (48, 64), (64, 48)) for one in weights)
    other = x.detach().clone().requires_grad_()
    wanted = torch.func.functional_call(_Plain(module), {f"inner.{name}": one for name, one in plain.items()}, other)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)
    for name in names:
        torch.testing.assert_close(dense_weight(module, before[name]), plain[name], rtol=0, atol=0)


class _Plain(torch.nn.Module):
    """A module with its own `forward`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return type(self.inner).forward(self.inner, x)
