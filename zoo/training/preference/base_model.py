"""The reference that is the model without its adapters: a further pass over the micro-batches of each step and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from zoo.model.lora import Adapters
from zoo.parallel.world import World
from zoo.training.evaluation import compared_logprobs, in_eval_mode


class BaseModel:
    """Gives micro-batches the log-probabilities that the weights have without adapters."""

    def __init__(self, adapters: Adapters, step: Any, chunks: Sequence[Any], world: World) -> None:
        """`step`: the family's PackedStep; `chunks`: this rank's model chunks."""
        self.adapters, self.step, self.chunks, self.world = adapters, step, chunks, world

    @torch.no_grad()
    def __call__(self, batches: Sequence[Any]) -> list[Any]:
        """The micro-batches, with `reference` where this rank has the loss. Every rank calls it with as many."""
        with in_eval_mode(self.chunks), self.adapters.off():
            found = [compared_logprobs(self.step, self.chunks, batch, self.world) for batch in batches]
        return [replace(batch, reference=values) for batch, values in zip(batches, found, strict=True)]
