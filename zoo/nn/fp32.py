"""Parameters that are held in fp32 in a model of bf16, as their checkpoint has them.

Norms and decays compute with all of their digits: such modules name the parameters in `fp32_parameters`. Other modules multiply in
the model's precision and read the parameter rounded to it, so its gradient is that of the rounded one. What is trained, saved
and published is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn

_as_held = False  # whether modules give the parameters themselves


@contextmanager
def as_held() -> Iterator[None]:
    """Modules give parameters of fp32 as they are inside the block, for code that keeps or describes them."""
    global _as_held
    before, _as_held = _as_held, True
    try:
        yield
    finally:
        _as_held = before


def hold_in_fp32(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Make parameters of a model in half precision fp32; their values are as they were."""
    wanted = set(parameters)
    for module in model.modules():
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter in wanted]
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            parameter.data = parameter.data.float()
        others = tuple(name for name in names if name not in getattr(module, "fp32_parameters", ()))
        if not others:
            continue
        if isinstance(module, nn.LayerNorm):
            _become(module, _layer_norm)
        elif hasattr(module, "variance_epsilon") and others == ("weight",):
            _become(module, _rms_norm)
        else:
            _become(module, partial(_rounding, names=others))
            for name in others:
                setattr(module._parameters[name], "read_as", torch.bfloat16)  # noqa: B010  # it is no attribute of a tensor's


def _become(module: nn.Module, change: Callable[..., type]) -> None:
    module.__class__ = change(module.__class__)


@cache
def _rounding(kind: type[nn.Module], names: tuple[str, ...]) -> type:
    """The class of a module that reads parameters rounded to bf16; nothing else is changed."""

    def rounded(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            parameter = self._parameters[name]
            return parameter if parameter is None or _as_held else parameter.to(torch.bfloat16)

        return property(read)

    return _subclass(kind, {name: rounded(name) for name in names})


@cache
def _rms_norm(kind: type[nn.Module]) -> type:
    """The class of a transformers' RMSNorm that gives its input's dtype; its weight multiplies in fp32."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        normed: Tensor = kind.forward(self, x)
        return normed.to(x.dtype)

    return _subclass(kind, {"forward": forward})


@cache
def _layer_norm(kind: type[nn.Module]) -> type:
    """The class of a LayerNorm that works with weight and bias in fp32, and gives its input's dtype."""

    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        normed = nn.functional.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)

    def wide(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            parameter = self._parameters[name]
            return parameter if parameter is None or _as_held else parameter.float()

        return property(read)

    return _subclass(kind, {"forward": forward, "weight": wide("weight"), "bias": wide("bias")})


def _subclass(kind: type[nn.Module], members: dict[str, object]) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **members})
