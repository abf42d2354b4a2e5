"""Forward passes that give a step's micro-batches what their loss needs, before the step's own pass.

A teacher gives its most likely tokens, the model without adapters a reference's log-probabilities, and mismatched answers
KTO's estimate of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zoo.config.derived import teacher_on_disk
from zoo.config.schema import Recipe
from zoo.data.sample import MicroBatch
from zoo.model.build import Assembly
from zoo.model.lora import Adapters
from zoo.parallel.world import World
from zoo.steps.packed_step import PackedStep
from zoo.training.distillation.teacher import Teacher
from zoo.training.evaluation import AuxiliaryPasses, compared_logprobs, in_eval_mode, segment_logprobs
from zoo.training.passes.reference import BASE
from zoo.training.passes.retrieval import FirstPass

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def auxiliary_passes(
    recipe: Recipe,
    assembly: Assembly,
    adapters: Adapters | None,
    step: PackedStep,
    chunks: Sequence[MegatronModule],
    world: World,
) -> AuxiliaryPasses | None:
    """The passes that a recipe's loss needs, as one function; None where it needs none.

    Loads a teacher, unless its tokens are on disk, where samples bring them.

    Args:
        step: of the model that is trained, like `chunks`.
    """
    passes: list[AuxiliaryPasses] = []
    if recipe.distill.teacher is not None and not teacher_on_disk(recipe):
        passes.append(Teacher(recipe, assembly, world))
    if recipe.train.reference == BASE and adapters is not None:
        passes.append(BaseModelReference(adapters, step, chunks, world))
    if recipe.train.labelled:
        passes.append(KLEstimate(step, chunks, world))
    if recipe.train.embeds:
        passes.append(FirstPass(step, chunks, world))

    def in_turn(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        for auxiliary_pass in passes:
            batches = auxiliary_pass(batches)
        return [*batches]

    return in_turn if passes else None


@dataclass(frozen=True)
class BaseModelReference:
    """Gives micro-batches the log-probabilities that the weights have without adapters."""

    adapters: Adapters
    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World

    @torch.no_grad()
    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, with `reference` where this rank has the loss. Every rank calls it with as many."""
        with in_eval_mode(self.chunks), self.adapters.off():
            logprobs = [compared_logprobs(self.step, self.chunks, batch, self.world) for batch in batches]
        return [replace(batch, reference=values) for batch, values in zip(batches, logprobs, strict=True)]


@dataclass(frozen=True)
class KLEstimate:
    """Gives micro-batches of labelled answers the `kl` of all of them, on all ranks, and the `drift` of each."""

    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World

    @torch.no_grad()
    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, whose `reference` holds own and mismatched answers by turns; every rank calls it with as many.

        The estimate is the mean over all ranks' mismatched answers of how much more likely the policy finds them than the
        reference, at least 0 (TRL's, over the step in the place of a device's micro-batch).
        """
        with in_eval_mode(self.chunks):
            logprobs = [
                segment_logprobs(self.step, self.chunks, mismatched, self.world)
                for batch in batches
                if (mismatched := batch.mismatched) is not None
            ]
        with_drift: list[MicroBatch] = []
        totals = torch.zeros(2, device=self.world.device)
        for batch, policy in zip(batches, logprobs, strict=True):
            if policy is None:  # an earlier pipeline stage
                return [*batches]
            assert batch.reference is not None  # rows of labelled answers bring theirs
            drift = policy - batch.reference[1::2].to(policy.device)
            with_drift.append(replace(batch, reference=batch.reference[::2], drift=drift))
            if not batch.filler:
                totals += torch.stack((drift.sum(), drift.new_tensor(float(len(drift)))))
        if self.world.dp_size > 1:
            dist.all_reduce(totals, group=self.world.groups.dp)
        kl = (totals[0] / totals[1]).clamp(min=0)
        return [replace(batch, kl=kl) for batch in with_drift]
