"""Towers whose layers and mergers keep their input alone and run once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from zoo.nn.autograd import on_host, recomputed


def recompute_layers(tower: torch.nn.Module, *, offload: bool = False) -> None:
    """Have the modules of a tower's outermost lists (layers, deepstack's mergers) and its `merger` recomputed in training.

    `offload`: their inputs are in host memory until then.
    """
    for name, child in tower.named_children():
        if isinstance(child, torch.nn.ModuleList):
            for module in child:
                _recompute(module, offload)
        elif name == "merger":
            _recompute(child, offload)
        else:
            recompute_layers(child, offload=offload)


def _recompute(module: Any, offload: bool) -> None:
    module.forward = partial(_run, module, module.forward, offload)


def _run(module: torch.nn.Module, forward: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any) -> Any:
    tensors = (*args, *kwargs.values(), *module.parameters())
    if not module.training or not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        return forward(*args, **kwargs)  # nothing is kept
    with on_host() if offload else nullcontext():
        return recomputed(forward, *args, **kwargs)
