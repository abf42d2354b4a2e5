"""Towers whose layers and mergers keep their input alone and run once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zoo.nn.autograd import recomputed


def recompute_layers(tower: torch.nn.Module) -> None:
    """Have the modules of a tower's outermost lists (layers, deepstack's mergers) and its `merger` recomputed in training."""
    for name, child in tower.named_children():
        if isinstance(child, torch.nn.ModuleList):
            for module in child:
                _recompute(module)
        elif name == "merger":
            _recompute(child)
        else:
            recompute_layers(child)


def _recompute(module: Any) -> None:
    module.forward = partial(_run, module, module.forward)


def _run(module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return recomputed(forward, *args, **kwargs) if module.training else forward(*args, **kwargs)
