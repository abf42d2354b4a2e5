"""Runs in which the numbers of chosen steps go bad on one rank, and what each step leaves of the state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from support.rank_tasks import train


def state_of(trainable: Any) -> tuple[str, int]:
    """A digest of weights, fp32 masters, moments, step counts and learning rates, and the schedule's position."""
    digest = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())

    for chunk in trainable.chunks:
        for parameter in chunk.parameters():
            add(parameter)
    for one in trainable.optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            digest.update(repr((group["lr"], group["weight_decay"], group.get("step", 0))).encode())
            for master in group["params"]:
                add(master)
                for name, value in sorted(one.optimizer.state.get(master, {}).items()):
                    digest.update(name.encode())
                    add(torch.as_tensor(value).reshape(-1))
    return digest.hexdigest(), trainable.scheduler.num_steps


def train_poisoned(
    rank: int, size: int, overrides: Sequence[str], poison: Mapping[int, tuple[int, str]]
) -> dict[str, Any]:
    """`train`, where of step N gradient or loss is not finite on a rank: poison[N] = (rank, "gradient" or "loss").

    `states` is added: step -> `state_of` before and after it.
    """
    from zoo.training.trainer import Trainer

    states: dict[int, tuple[Any, Any]] = {}
    forward_backward, train_step = Trainer.forward_backward, Trainer.train_step

    def poisoned(run: Any, batches: Any, scale: Any) -> Any:
        culprit, what = poison.get(run.done + 1, (-1, ""))
        if culprit != rank:
            return forward_backward(run, batches, scale)
        if what == "gradient":
            return forward_backward(run, batches, scale * math.nan)
        sums = forward_backward(run, batches, scale)
        return [{**found, "nll": found["nll"] * math.inf} for found in sums]

    def watched(run: Any) -> bool:
        before = state_of(run.trainable)
        step = run.done + 1
        try:
            return train_step(run)
        finally:
            states[step] = (before, state_of(run.trainable))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "forward_backward", poisoned)
        patch.setattr(Trainer, "train_step", watched)
        return {**train(rank, size, overrides), "states": states}


def train_out_of_memory(rank: int, size: int, overrides: Sequence[str], culprit: int) -> dict[str, Any]:
    """`train`, where a rank's GPU has no memory left for the second step's forward pass, in torch's own words."""
    from zoo.training.trainer import Trainer

    forward_backward = Trainer.forward_backward

    def failing(run: Any, batches: Any, scale: Any) -> Any:
        if run.done + 1 == 2 and rank == culprit:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "1.02 GiB is free."
            )
        return forward_backward(run, batches, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "forward_backward", failing)
        return train(rank, size, overrides)


def train_recording_rates(
    rank: int, size: int, overrides: Sequence[str], poison: Mapping[int, tuple[int, str]]
) -> list[list[float]]:
    """`train_poisoned`; of each update, the learning rates that AdamW itself has used, smallest first."""
    from zoo.optim.adamw import AdamW

    rates: list[list[float]] = []
    step = AdamW.step

    def recorded(self: Any, *arguments: Any, **options: Any) -> Any:
        rates.append(sorted({group["lr"] for group in self.param_groups if group["params"]}))
        return step(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "step", recorded)
        train_poisoned(rank, size, overrides, poison)
    return rates
