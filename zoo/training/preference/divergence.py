"""KTO's estimate of the KL divergence of policy and reference: a pass over mismatched answers before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zoo.parallel.world import World
from zoo.training.evaluation import in_eval_mode, segment_logprobs


class Divergence:
    """Gives micro-batches of labelled answers the `kl` of all of them, on all ranks, and the `drift` of each."""

    def __init__(self, step: Any, chunks: Sequence[Any], world: World) -> None:
        """`step`: the family's PackedStep; `chunks`: this rank's model chunks."""
        self.step, self.chunks, self.world = step, chunks, world

    @torch.no_grad()
    def __call__(self, batches: Sequence[Any]) -> list[Any]:
        """The micro-batches, whose `reference` holds own and mismatched answers by turns; every rank calls it with as many.

        The estimate is the mean over all ranks' mismatched answers of how much more likely the policy finds them than the
        reference, at least 0 (TRL's, over the step in the place of a device's micro-batch).
        """
        with in_eval_mode(self.chunks):
            found = [segment_logprobs(self.step, self.chunks, one.mismatched, self.world) for one in batches]
        drifts = [
            None if policy is None else policy - batch.reference[1::2].to(policy.device)
            for batch, policy in zip(batches, found, strict=True)
        ]
        there = [drift for drift in drifts if drift is not None]
        if not there:  # an earlier pipeline stage
            return list(batches)
        counted = [drift for drift, batch in zip(drifts, batches, strict=True) if drift is not None and not batch.spare]
        sums = there[0].new_zeros(2)
        for drift in counted:
            sums += torch.stack((drift.sum(), drift.new_tensor(float(len(drift)))))
        if self.world.dp_size > 1:
            dist.all_reduce(sums, group=self.world.groups.dp)
        kl = (sums[0] / sums[1]).clamp(min=0)
        return [
            replace(batch, reference=batch.reference[::2], kl=kl, drift=drift)
            for batch, drift in zip(batches, drifts, strict=True)
        ]
