"""What a loop that is not zoo's does with `PackedStep.logprobs`: its own loss, its own backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from support.rank_gradients import Held, Plan, _Built, _read, _recipe


def objective(logprobs: Tensor, labels: int) -> Tensor:
    """A loss that is no sum of likelihoods: its gradient at a token depends on the token's own value."""
    return (0.1 * logprobs.square() - logprobs).sum() / labels


def run_foreign(rank: int, size: int, plan: Plan, how: str) -> Held:
    """Gradients of `objective` over the plan's micro-batches.

    `how`: "direct": `loss.backward()` through zoo's DDP; "schedule": megatron-core's; "own": no DDP, averaged here.
    """
    from megatron.core.distributed import finalize_model_grads

    from zoo.model import build
    from zoo.parallel.world import open_world

    (layout,) = plan.layouts
    recipe = _recipe(plan, layout, size)
    with open_world(recipe) as here:
        built = _Built(recipe, here)
        step, batches = build.build_step(built.assembly, recipe, here), _read(layout.batches)
        mine = batches[here.dp_rank :: here.dp_size]
        for chunk in built.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        total = 0.0

        def loss_of(output: Tensor, loss_inputs: Any) -> Tensor:
            nonlocal total
            loss = objective(step.logprobs(output, loss_inputs), plan.labels)
            total += float(loss.detach()) if here.cp_rank == 0 and here.counts_loss else 0.0
            return loss * here.dp_size  # of which the mean over data-parallel ranks is taken

        def forward(data: Iterator[Any], model: Any) -> Any:
            inputs, loss_inputs = step.prepare(next(data), logprobs=True)
            return step.forward(model, inputs), lambda output: (loss_of(output, loss_inputs) * len(mine), {})

        if how == "schedule":
            built._schedule(forward, mine, mine)
        else:
            model = built.wrapped[0] if how == "direct" else built.wrapped[0].module
            for batch in mine:
                inputs, loss_inputs = step.prepare(batch, logprobs=True)
                loss_of(step.forward(model, inputs), loss_inputs).backward()
            if how == "direct":
                finalize_model_grads(built.wrapped, force_all_reduce=True)
            else:
                _average(built.wrapped[0], here.groups.dp_cp)
        return built.held(total, len(mine))


def _average(wrapped: Any, group: Any) -> None:
    """As without a DDP: what its hooks have put into `main_grad` is this rank's own gradient."""
    for parameter in wrapped.module.parameters():
        if parameter.requires_grad:
            torch.distributed.all_reduce(parameter.main_grad, group=group)
            parameter.main_grad /= group.size()
