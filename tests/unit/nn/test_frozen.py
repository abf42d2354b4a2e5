"""Frozen weights in fewer bits: what a block keeps, and that modules compute and differentiate with the dense weight alone."""

import itertools
from functools import partial
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.frozen import nf4
from zoo.nn.decoder.frozen.fp8 import Fp8
from zoo.nn.decoder.frozen.modules import FORMATS, dense_weight, freeze, hold
from zoo.nn.decoder.frozen.nf4 import Nf4

# What bitsandbytes 0.50.2 makes of the square below: some of its codes and of its largest values, scale and mean, some dense values.
CODES = [7, 25, 27, 44, 78, 94, 127, 144, 177]
LARGEST = [0, 11, 22, 33, 45, 55, 76, 189, 201, 211, 223, 233, 244]
SCALES = [63.634124755859375, 63.881500244140625]
VALUES = [-0.6948051452636719, 5.897103786468506, -24.32789421081543, 50.58995819091797, 0.0, -82.23404693603516]


exactly = partial(torch.testing.assert_close, rtol=0, atol=0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(weight: Tensor, base_dtype: str) -> Tensor:
    return hold(weight, base_dtype).dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 256), (5, 130), (2, 7, 96)], ids=str)
def test_fp8_is_near_and_exact_in_bf16(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = randn(*shape) * torch.logspace(-6, 6, shape[-1])
    weight[0] = 0.0
    weight = weight.to(dtype)
    found = hold(weight, "fp8")
    assert isinstance(found, Fp8) and found.codes.shape == shape and found.scales.shape[-1] == -(-shape[-1] // 128)
    assert bool((found.codes.float().abs() <= 448).all())
    values = found.dense()
    assert values.dtype == dtype
    exactly(values.bfloat16().to(dtype), values)
    error, size = (values - weight).float().abs(), weight.float().abs()
    for start in range(0, shape[-1], 128):
        block = (..., slice(start, start + 128))
        largest = size[block].amax(-1, keepdim=True)
        assert bool((error[block] <= torch.maximum(size[block] / 16, largest * 2.0**-17)).all())
    exactly(dense(values, "fp8"), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 256), (150, 130), (3, 7, 96), (640, 2048)], ids=str)
def test_nf4_takes_the_nearest_of_16_values(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is off by half a step at most; the widest step is from -1 to -0.696, and a block's largest value is 1 % off."""
    weight = (randn(*shape) * torch.logspace(-3, 3, shape[-2]).unsqueeze(-1)).to(dtype)
    weight[..., 0, :] = 0.0
    values = dense(weight, "nf4")
    assert values.dtype == dtype and values.shape == weight.shape
    norms = (values - weight).float().norm() / weight.float().norm()
    assert 0.07 < norms < 0.12
    for start in range(0, shape[-1], 64):
        block = (..., slice(start, start + 64))
        largest = weight[block].float().abs().amax(-1, keepdim=True)
        square = largest.amax(-2, keepdim=True)
        assert bool(((values - weight)[block].float().abs() <= 0.153 * largest + 0.02 * square).all())
    assert not values[..., 0, :].any() or shape[-2] > 1
    monkeypatch.setattr(nf4, "_AT_ONCE", (2**14, 2**14))
    exactly(dense(weight, "nf4"), values)


def test_its_values_are_quantiles() -> None:
    """The paper takes quantiles of the normal distribution on either side of zero, and divides them by the largest."""
    found = nf4.levels("cpu")
    ends = 0.5 * (1 - 1 / 30 + 1 - 1 / 32)
    positive = [NormalDist().inv_cdf(0.5 + (ends - 0.5) * i / 8) for i in range(9)]
    negative = [-NormalDist().inv_cdf(0.5 + (ends - 0.5) * i / 7) for i in range(1, 8)]
    wanted = torch.tensor(sorted(negative + positive), dtype=torch.float64) / max(positive)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_square_is_that_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Codes of 8 bits are those of its portable kernel, as its library for the CPU takes a neighbour of the nearest at times."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    map_of_8_bits = functional.create_dynamic_map()
    weight = (randn(256, 384) * torch.logspace(-2, 2, 256).unsqueeze(1)).to(dtype)
    found = hold(weight, "nf4")
    assert isinstance(found, Nf4)
    values = found.dense()
    for down, across in itertools.product(range(2), range(3)):
        square = (slice(down * 128, (down + 1) * 128), slice(across * 128, (across + 1) * 128))
        codes, state = functional.quantize_4bit(weight[square].contiguous(), quant_type="nf4")
        mean = state.absmax.mean()
        largest, scale = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(
            keys, state.absmax - mean, map_of_8_bits, 256
        )
        mine = found.codes[square[0], across * 64 : (across + 1) * 64]
        exactly(mine.reshape(-1, 1), codes)
        exactly(found.largest[down, across], largest)
        exactly(found.scales[down, across], torch.stack((scale[0], mean)))
        inner = functional.QuantState(absmax=scale, code=map_of_8_bits, blocksize=256, dtype=torch.float32)
        state.absmax, state.offset, state.state2, state.nested = largest, mean, inner, True
        exactly(values[square], functional.dequantize_4bit(codes, state))
    whole, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    exactly(found.codes.reshape(-1, 1), whole)
    theirs = functional.dequantize_4bit(whole, state)
    ratio = (values - weight).float().norm() / (theirs - weight).float().norm()
    assert 0.99 < ratio < 1.01


def test_a_square_has_the_numbers_that_bitsandbytes_gave() -> None:
    """So that the format is held where bitsandbytes is not installed."""
    rising = torch.arange(1, 129).unsqueeze(1)
    found = hold((torch.arange(128 * 128) * 7919 % 16411 / 8192 - 1).reshape(128, 128) * rising, "nf4")
    assert isinstance(found, Nf4)
    assert found.codes.flatten()[::1000].tolist() == CODES and found.largest.flatten()[::20].tolist() == LARGEST
    assert found.scales.flatten().tolist() == SCALES
    assert found.dense().flatten()[::3000].tolist() == VALUES


@pytest.mark.parametrize("base_dtype", FORMATS)
def test_half_of_a_matrix_has_the_same_values(base_dtype: str) -> None:
    weight = randn(384, 512)
    whole = dense(weight, base_dtype)
    exactly(dense(weight[128:256], base_dtype), whole[128:256])
    exactly(dense(weight[:, 256:], base_dtype), whole[:, 256:])
    exactly(dense(weight.view(3, 128, 512), base_dtype), whole.view(3, 128, 512))


@pytest.mark.parametrize(("base_dtype", "bytes_each"), [("fp8", 1.015625), ("nf4", 0.51611328125)])
def test_bytes_of_a_weight(base_dtype: str, bytes_each: float) -> None:
    held = hold(randn(256, 384), base_dtype)
    stored = sum(value.nbytes for value in vars(held).values() if isinstance(value, Tensor))
    assert stored / (256 * 384) == held.bytes_each == bytes_each


class Experts(torch.nn.Module):
    """Two stacked weights, one of them read transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = torch.nn.Parameter(torch.randn(3, 40, 64))
        self.weight2 = torch.nn.Parameter(torch.randn(3, 64, 40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.weight1.transpose(1, 2)).relu(), self.weight2.transpose(1, 2))


@pytest.mark.parametrize("base_dtype", FORMATS)
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_module_computes_with_the_dense_weight_and_keeps_none(kind: str, base_dtype: str) -> None:
    module: Any = torch.nn.Linear(64, 48) if kind == "linear" else Experts()
    names = [name for name, one in module.named_parameters() if one.ndim > 1]
    plain = {name: torch.nn.Parameter(dense(getattr(module, name).detach(), base_dtype)) for name in names}
    module.requires_grad_(False)
    before = dict(module.named_parameters())
    freeze(module, names, base_dtype)
    assert dict(module.named_parameters()) == before  # the same objects
    assert all(before[name].shape == plain[name].shape and before[name].isnan().all() for name in names)
    assert all(before[name].untyped_storage().nbytes() == 4 for name in names)
    x = torch.randn(3, 5, 64, requires_grad=True)
    weights = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: weights.append(one) or one, lambda one: one):
        found = module(x)
    assert not any(one.shape[-2:] in ((64, 40), (40, 64), (48, 64), (64, 48)) for one in weights)
    other = x.detach().clone().requires_grad_()
    wanted = torch.func.functional_call(_Plain(module), {f"inner.{name}": one for name, one in plain.items()}, other)
    exactly(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    exactly(x.grad, other.grad)
    for name in names:
        exactly(dense_weight(before[name]), plain[name])


class _Plain(torch.nn.Module):
    """A module with its own `forward`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return type(self.inner).forward(self.inner, x)
