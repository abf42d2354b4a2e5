"""Frozen weights held in FP8 and made dense where a module multiplies by them, forward and once more backward.

A block is 128 values of a row, which share a scale that is a power of two. So a dense value, 3 bits of mantissa times that scale,
is exact in bf16, and the same on every device. Rows are cut over ranks at any place, columns at multiples of a block, without
another rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BLOCK = 128  # values of a row that share a scale
DTYPE = torch.float8_e4m3fn
_ROWS = 2**13  # quantised at a time, so that what is held in fp32 stays small beside the weights
_LARGEST = 8  # 2**8 is the largest power of two in it; 448 the largest value


@dataclass(frozen=True)
class Quantised:
    """A weight (..., n): `codes` (..., n) in float8_e4m3fn, `scales` (..., ceil(n / BLOCK)) in bf16, powers of two."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype  # of the dense weight

    @classmethod
    @torch.no_grad()
    def from_weight(cls, weight: Tensor) -> Quantised:
        """The nearest codes; a value is at most a sixteenth of itself off, or 2**-17 of its block's largest."""
        width, count = weight.shape[-1], -(-weight.shape[-1] // BLOCK)
        codes = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
        scales = torch.empty(*weight.shape[:-1], count, dtype=torch.bfloat16, device=weight.device)
        rows = (tensor.view(-1, tensor.shape[-1]).split(_ROWS) for tensor in (weight.contiguous(), codes, scales))
        for part, into, scale in zip(*rows, strict=True):
            blocks = _blocks(part.float())
            largest = blocks.abs().amax(dim=-1, keepdim=True)
            exponent = torch.frexp(largest).exponent - 1 - _LARGEST
            factor = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-100))
            factor = torch.where(largest > 448 * factor, 2 * factor, factor)
            into.copy_((blocks / factor).flatten(-2)[:, :width])
            scale.copy_(factor[..., 0])
        return cls(codes, scales, weight.dtype)

    def dense(self) -> Tensor:
        """The weight that the codes stand for, as a new tensor."""
        dense = self.codes.to(self.dtype)
        width = dense.shape[-1]
        if width % BLOCK:
            return dense.mul_(self.scales.to(self.dtype).repeat_interleave(BLOCK, dim=-1)[..., :width])
        dense.view(*dense.shape[:-1], -1, BLOCK).mul_(self.scales.to(self.dtype).unsqueeze(-1))
        return dense


def _blocks(values: Tensor) -> Tensor:
    """(..., n) -> (..., ceil(n / BLOCK), BLOCK), zeros behind the last."""
    padded = F.pad(values, (0, -values.shape[-1] % BLOCK))
    return padded.view(*padded.shape[:-1], -1, BLOCK)


# A parameter, and the view of its dense weight.
type _Saved = tuple[str, torch.Size, tuple[int, ...], int | torch.SymInt]


@dataclass
class _Frozen:
    """Stands for a module's `forward`: the module's own, with dense weights in the place of the codes."""

    module: torch.nn.Module
    forward: Callable[..., object]
    held: dict[str, Quantised] = field(default_factory=dict)

    def __call__(self, *args: object, **kwargs: object) -> object:
        dense = {name: held.dense() for name, held in self.held.items()}
        by_address = {held.untyped_storage().data_ptr(): name for name, held in dense.items()}

        def pack(saved: Tensor) -> Tensor | _Saved:
            name = by_address.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
            if name is None:
                return saved
            return name, saved.shape, saved.stride(), saved.storage_offset()

        def unpack(packed: Tensor | _Saved) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            name, size, stride, offset = packed
            return self.held[name].dense().as_strided(size, stride, offset)

        # An instance's own attributes come before its parameters, which keep their names and hold the codes.
        self.module.__dict__.update(dense)
        try:
            with saved_tensors_hooks(pack, unpack):
                return self.forward(*args, **kwargs)
        finally:
            for name in dense:
                del self.module.__dict__[name]


@torch.no_grad()
def freeze(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Hold these parameters of a module in FP8; each is not trained, and keeps its name and shape.

    Their data are codes: `dense_weight` gives the values.
    """
    wrapped = _Frozen(module, module.forward)
    for name in names:
        parameter = getattr(module, name)
        assert not parameter.requires_grad, name
        quantised = wrapped.held[name] = Quantised.from_weight(parameter.detach())
        parameter.data = quantised.codes
    module.forward = wrapped


def dense_weight(module: torch.nn.Module, parameter: Tensor) -> Tensor:
    """The values of a module's parameter: itself, or what its codes stand for."""
    wrapped = module.forward
    if isinstance(wrapped, _Frozen):
        for name, quantised in wrapped.held.items():
            if module._parameters[name] is parameter:
                return quantised.dense()
    return parameter
