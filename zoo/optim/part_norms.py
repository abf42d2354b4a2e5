"""Norms of the gradient by part of the model, as shares of this rank that add up to a part's norm over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zoo.bridge.parallel import model_parameters
from zoo.optim.adamw import norm_gradients
from zoo.parallel.megatron.inner_optimizer import held_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from zoo.parallel.world import World
    from zoo.registry import ModelFamily

_WITHIN_LANGUAGE = {".experts.": "experts", ".router.": "router", "embedding.": "embedding", "output_layer.": "head"}


class PartNorms:
    """Squared norms of the gradient by part of the model, in every so many steps.

    Parts are the family's (a tower's merger apart from the tower), with experts, router, embedding and head apart from the language model.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], family: ModelFamily, world: World, every: int) -> None:
        """Every rank calls it. `every`: steps between two times; 0: never."""
        self._device, self._every = world.device, every
        self._parts: dict[int, str] = {}  # by a parameter's id: this must not keep the model
        self._all: list[str] = []  # of all ranks, in one order
        if every:
            named = family.inner.keys()
            for name, parameter in model_parameters(chunks):
                part = family.part_of(name, named)
                if part == "language":
                    part = next((known for mark, known in _WITHIN_LANGUAGE.items() if mark in name), part)
                if getattr(
                    parameter, "shared_embedding", False
                ):  # a tied head, which has a name of its own on the last stage
                    part = "embedding"
                if parameter.requires_grad:
                    self._parts[id(parameter)] = part
            parts = [set(self._parts.values())] * world.size
            if world.size > 1:
                dist.all_gather_object(parts, parts[0])
            self._all = sorted(set().union(*parts))

    def squares(self, optimizer: MegatronOptimizer, step: int) -> dict[str, torch.Tensor]:
        """By part, this rank's share as `squared_norm` gives it, whose sum theirs is; {} in steps that are not due."""
        if not self._every or step % self._every:
            return {}
        counted = {id(grad) for grad in norm_gradients(optimizer)}
        grads: dict[str, list[torch.Tensor]] = {part: [] for part in self._all}
        for chained in optimizer.chained_optimizers:
            if not chained.is_stub_optimizer:
                for held in held_ranges(chained):
                    if id(grad := held.part.decoupled_grad) in counted:  # type: ignore[attr-defined]  # prepare_grads sets it
                        grads[self._parts[id(held.parameter)]].append(grad)
        return {part: squared(of_part, self._device) for part, of_part in grads.items()}


def squared(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """() float64 on the device: the sum of their squared norms."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).double().square().sum()
