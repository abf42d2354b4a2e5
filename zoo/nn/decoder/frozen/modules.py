"""Frozen weights held in fewer bits, and made dense where a module multiplies by them, forward and once more backward.

A held parameter keeps its name, shape, dtype and device, without memory of its own: its numbers are NaN, and `parameter.held` has the
values. `dense_weight` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zoo.nn.decoder.frozen.fp8 import Fp8
from zoo.nn.decoder.frozen.nf4 import Nf4


class Held(Protocol):
    """A weight (..., R, C) in fewer bits."""

    bytes_each: ClassVar[float]  # of a value, where blocks are full

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Room for a weight; `dtype` is the dense one's."""

    def write(self, weight: Tensor, index: int | None = None) -> None:
        """Hold the codes nearest to a weight, or to one of the first axis."""

    def dense(self) -> Tensor:
        """The weight that the codes stand for, as a new tensor."""


FORMATS: dict[str, type[Held]] = {"fp8": Fp8, "nf4": Nf4}
"""By the value of `lora.base_dtype`."""


def hold(weight: Tensor, base_dtype: str) -> Held:
    """A weight in that format."""
    held = FORMATS[base_dtype].empty(weight.shape, weight.dtype, weight.device)
    held.write(weight)
    return held


# A parameter, and the view of its dense weight.
type _Saved = tuple[str, torch.Size, tuple[int, ...], int | torch.SymInt]


@dataclass
class _Frozen:
    """Stands for a module's `forward`: the module's own, with dense weights in the place of those held."""

    module: torch.nn.Module
    forward: Callable[..., object]
    held: dict[str, Held]

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

        # An instance's own attributes come before its parameters.
        self.module.__dict__.update(dense)
        try:
            with saved_tensors_hooks(pack, unpack):
                return self.forward(*args, **kwargs)
        finally:
            for name in dense:
                del self.module.__dict__[name]


def without_memory(parameter: torch.nn.Parameter) -> Tensor:
    """A tensor of NaN like a parameter, with memory for one number."""
    return parameter.detach().new_full((1,), torch.nan).expand(parameter.shape)


@torch.no_grad()
def freeze(module: torch.nn.Module, names: Iterable[str], base_dtype: str, *, empty: bool = False) -> None:
    """Hold these parameters of a module, which are not trained, in a format.

    `empty`: the parameters have no values yet; whoever loads them calls `parameter.held.write`.
    """
    held: dict[str, Held] = {}
    for name in names:
        parameter = module._parameters[name]
        assert parameter is not None
        make = FORMATS[base_dtype].empty(parameter.shape, parameter.dtype, parameter.device)
        if not empty:
            make.write(parameter.detach())
        parameter.held = held[name] = make  # type: ignore[attr-defined]
        parameter.data = without_memory(parameter)
    module.forward = _Frozen(module, module.forward, held)


def dense_weight(parameter: Tensor) -> Tensor:
    """The values of a parameter: itself, or what its codes stand for."""
    held: Held | None = getattr(parameter, "held", None)
    return parameter if held is None else held.dense()
