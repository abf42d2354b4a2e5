"""A teacher beside the model that is trained: it goes through the same micro-batches, and gives them its most likely tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint import initial_weights
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model import build
from zoo.nn.head.distillation import Teaching, TopK, TopTokens
from zoo.parallel.world import World
from zoo.training.evaluation import smallest_count


class Teacher:
    """Gives micro-batches the `teaching` of their labels, in the layout that the student's forward pass has on each rank."""

    def __init__(self, recipe: Recipe, assembly: build.Assembly, world: World) -> None:
        """`recipe` and `assembly`: of the run.

        Raises:
            UserError: `distill.teacher` names no weights, or those of a model with another vocabulary.
        """
        settings, self.world = recipe.distill, world
        assert settings.teacher is not None
        self.top_k, self.temperature = settings.top_k, settings.temperature
        recipe = build.with_other_model(recipe, settings.teacher, world)
        theirs = build.assemble(recipe)
        sizes = [one.config.text.vocab_size for one in (assembly, theirs)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"distill.teacher={settings.teacher}: a vocabulary of {sizes[1]:,} tokens, and the student's has {sizes[0]:,}; wanted a "
                "teacher of the same tokens"
            )
        self.chunks = build.build_model(theirs, recipe, world)
        initial_weights.init_weights(self.chunks, theirs, recipe, world)
        for chunk in self.chunks:
            chunk.eval().requires_grad_(False)
        self.step = build.build_step(theirs, recipe, world)

    def __call__(self, batches: Sequence[Any]) -> list[Any]:
        """The micro-batches, with `teaching` where this rank has the loss. Every rank calls it with as many."""
        return [replace(batch, teaching=self._of(batch)) for batch in batches]

    def _of(self, batch: Any) -> Teaching | None:
        wanted = TopK(self.top_k, self.temperature)
        found = top_of(self.step, self.chunks, batch, self.world, wanted)
        return None if found is None else Teaching(found[0], self.temperature)


@torch.no_grad()
def top_of(step: Any, chunks: Sequence[Any], batch: Any, world: World, wanted: TopK) -> tuple[TopTokens, Tensor] | None:
    """A model's most likely tokens of this rank's labels, and the labels' places (N,) int64 in the flattened micro-batch.

    None on earlier pipeline stages. Every rank calls it.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data: Any, model: Any) -> Any:
        inputs, loss_inputs = step.prepare(next(data), logprobs=True)
        output, places = step.forward(model, replace(inputs, top=wanted)), loss_inputs.label_source
        return output, lambda output: (output.new_zeros(()), {"top": output, "places": places})

    given = [itertools.repeat(batch) for _ in chunks]
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=given if len(given) > 1 else given[0],
        model=list(chunks),
        num_microbatches=smallest_count(world, chunks),
        seq_length=batch.input_ids.shape[1],
        micro_batch_size=batch.input_ids.shape[0],
        forward_only=True,
    )
    return (TopTokens.split(found[0]["top"]), found[0]["places"]) if found else None
