"""Experts drawn evenly at random in the place of a router's choice.

A router with random weights sends most tokens to the same few experts: in layers of Qwen3 30B-A3B one of four ranks got up to 2.0
times its share of them, which the others wait for. Published weights are trained to balance, and published figures are often measured
with Megatron-LM's `--moe-router-force-load-balancing`, which does the same as this. There each call draws anew, so a layer that is
recomputed would get other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.nn.decoder.experts.router import Router


def route_evenly(chunks: Sequence[Any], rank: int) -> None:
    """Have all routers of model chunks draw their tokens' experts, other ones in each layer and on each rank."""
    for chunk in chunks:
        for router in (module for module in chunk.modules() if isinstance(module, Router)):
            router.gating = partial(_drawn, router.gating, 1000 * rank + router.layer_number)  # type: ignore[method-assign]


def _drawn(gating: Callable[[Tensor], Tensor], seed: int, hidden: Tensor) -> Tensor:
    """hidden (..., width) -> logits (..., E), the same in each call, with the gradient of the router's own."""
    logits = gating(hidden)
    generator = torch.Generator(logits.device).manual_seed(seed)
    drawn = torch.randn(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
    return logits + (drawn - logits).detach()
