"""Random numbers that recorded layers draw: others at each replay.

A graph can't go by megatron-core's tracker, which sets the device's generator anew for each use. It holds generators of its own, and a
replay draws on from where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import Function

from zoo.nn.autograd import Context

_generators: dict[tuple[str, str], torch.Generator] = {}  # by name and type of device
_inside = False  # recorded layers are running


def seed(name: str, device: torch.device, number: int) -> None:
    """Start the numbers of a generator anew."""
    _generators.setdefault((name, device.type), torch.Generator(device)).manual_seed(number)


def generator_inside(name: str, device: torch.device) -> torch.Generator | None:
    """The generator that recorded layers draw from; None for layers that run as they are."""
    return _generators[name, device.type] if _inside else None


def register(graph: torch.cuda.CUDAGraph) -> None:
    """Have a graph draw on at each replay. To be called before it is captured."""
    for generator in _generators.values():
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)


@contextmanager
def inside() -> Iterator[None]:
    """Recorded layers run inside the block."""
    global _inside
    before, _inside = _inside, True
    try:
        yield
    finally:
        _inside = before


@contextmanager
def unchanged() -> Iterator[None]:
    """What is drawn inside the block, while layers are tried and recorded, is drawn again behind it."""
    states = [(generator, generator.get_state()) for generator in _generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def dropout(x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """x with a share `rate` of its values set to zero, and the others times 1 / (1 - rate)."""
    return _Dropout.apply(x, rate, generator)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - rate, generator=generator)
        ctx.scale = 1.0 / (1.0 - rate)
        ctx.save_for_backward(mask)
        return torch.ops.aten.native_dropout_backward(x, mask, ctx.scale)  # x * mask * scale, in one pass

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.aten.native_dropout_backward(grads[0], *ctx.saved_tensors, ctx.scale), None, None
