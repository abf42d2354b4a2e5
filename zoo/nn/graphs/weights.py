"""A layer's weights as leaves of their own, for a gradient that is captured.

Autograd hands a parameter's gradient over on the stream that the parameter was first used on, which is DDP's: a graph that is
captured on another stream can't wait for that one. Other leaves on the same memory have no such past.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class NoGradientError(RuntimeError):
    """A trained weight of a layer has no part in what the layer gives."""


class Leaves:
    """Parameters on the memory, and with the marks, of a layer's own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._places: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.trained: dict[str, torch.nn.Parameter] = {}  # by the layer's names
        for prefix, module in layer.named_modules():
            for name, own in module.named_parameters(recurse=False):
                if own not in made:
                    made[own] = leaf = torch.nn.Parameter(own.detach(), own.requires_grad)
                    leaf.__dict__.update(own.__dict__)
                    if own.requires_grad:
                        self.trained[f"{prefix}.{name}".lstrip(".")] = leaf
                self._places.append((module, name, own))
        self._made = made

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layer has them in the place of its own."""
        for module, name, own in self._places:
            module._parameters[name] = self._made[own]
        try:
            yield
        finally:
            for module, name, own in self._places:
                module._parameters[name] = own

    def gradients(self, out: Tensor, states: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `states`, from that of `out`, which a run with these in place made of them.

        Those of weights go to DDP's buffers, unless a product added them there. NoGradientError for a weight without one.
        """
        for leaf in self.trained.values():
            leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        wanted = (states, *self.trained.values())
        of_states, *found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
        for (name, leaf), gradient in zip(self.trained.items(), found, strict=True):
            if gradient is None:
                raise NoGradientError(f"{name} gets no gradient when its layer is captured")
            if not leaf.grad_added_to_main_grad:  # type: ignore[attr-defined]
                leaf.main_grad.add_(gradient)  # type: ignore[attr-defined]
        assert of_states is not None
        return of_states.detach()
