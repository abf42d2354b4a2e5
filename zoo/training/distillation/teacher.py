"""A teacher beside the model that is trained: it goes through the same micro-batches, and gives them its most likely tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.checkpoint import initial_weights
from zoo.config.schema import Recipe
from zoo.data.sample import MicroBatch
from zoo.model import build
from zoo.nn.head import DistillationInputs, TopK, TopTokens
from zoo.parallel.world import World
from zoo.steps.packed_step import PackedStep
from zoo.training.evaluation import forward_only

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


class Teacher:
    """Gives micro-batches the `teaching` of their labels, in the layout that the student's forward pass has on each rank."""

    def __init__(self, recipe: Recipe, assembly: build.Assembly, world: World) -> None:
        """`recipe` and `assembly`: of the run.

        Raises:
            UserError: `distill.teacher` names no weights, or those of a model with another vocabulary.
        """
        self.top_k, self.temperature, self.world = recipe.distill.top_k, recipe.distill.temperature, world
        recipe, theirs = build.assemble_other(recipe, "distill.teacher", assembly.config.text.vocab_size, world)
        self.chunks = initial_weights.load_frozen(theirs, recipe, world)
        self.step = build.build_step(theirs, recipe, world)

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, with `teaching` where this rank has the loss. Every rank calls it with as many."""
        wanted, completed = TopK(self.top_k, self.temperature), []
        for batch in batches:
            top = top_tokens_of(self.step, self.chunks, batch, self.world, wanted)
            teaching = None if top is None else DistillationInputs(top[0], self.temperature)
            completed.append(replace(batch, teaching=teaching))
        return completed


@torch.no_grad()
def top_tokens_of(
    step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World, wanted: TopK
) -> tuple[TopTokens, Tensor] | None:
    """A model's most likely tokens of this rank's labels, and the labels' places (N,) int64 in the flattened micro-batch.

    None on earlier pipeline stages. Every rank calls it.
    """

    def forward(data: Iterator[MicroBatch], model: MegatronModule) -> tuple[Tensor, Callable[..., object]]:
        inputs, loss_inputs = step.prepare(next(data), logprobs=True)
        output, places = step.forward(model, replace(inputs, top=wanted)), loss_inputs.label_source
        return output, lambda output: (output.new_zeros(()), {"top": output, "places": places})

    outputs = forward_only(forward, chunks, batch, world)
    return (TopTokens.split(outputs[0]["top"]), outputs[0]["places"]) if outputs else None
