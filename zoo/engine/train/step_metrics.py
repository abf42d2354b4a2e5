"""Metrics of one step: the counts that the host knows before it, and the totals over all ranks after it.

Loss and gradient are those of Hugging Face under gradient accumulation: the sum of negative log likelihoods over
all labelled tokens of a global batch, divided by their number N (where they are weighted: each times its weight, and N
is the sum of the weights). N is known on the host before the forward pass (one small all-reduce), so the scale of
every micro-batch is right at once: mcore's schedule multiplies by cp / micro-batches and its DDP averages over
dp * cp ranks, hence `Counts.loss_scale` = dp * micro-batches / N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zoo.engine.distributed.world import World
from zoo.steps.losses.distillation import DistillationLoss
from zoo.steps.losses.preference import AnswerLoss


@dataclass(frozen=True)
class Counts:
    """Tokens of this rank's micro-batches of one step, known to the host."""

    real: int
    total: int
    weight: float  # of the labels; their number where they are not weighted
    batches: int

    @classmethod
    def of(cls, batches: Sequence[Any]) -> Counts:
        """Sums over micro-batches."""
        return cls(
            sum(b.real_tokens for b in batches),
            sum(b.total for b in batches),
            sum(b.num_labels if b.label_weight is None else b.label_weight for b in batches),
            len(batches),
        )

    def loss_scale(self, world: World) -> torch.Tensor | float:
        """dp * micro-batches / N; a device tensor where N comes from several ranks, so that the host doesn't wait."""
        if world.dp_size == 1:
            return self.batches / self.weight if self.weight else 1.0
        total = torch.tensor(float(self.weight), device=world.device)
        dist.all_reduce(total, group=world.groups.dp)
        return world.dp_size * self.batches / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True)
class Totals:
    """Metrics of one step over all ranks."""

    real: float
    total: float
    loss: float
    labels: float
    grad_norm: float
    mtp_loss: float | None
    further: Mapping[str, float] = field(default_factory=dict)  # what a loss has to say beside

    @classmethod
    def of(
        cls,
        sums: Sequence[dict[str, Any]],
        counts: Counts,
        grad_norm: float,
        world: World,
        *,
        mtp: bool,
        reported: AnswerLoss | DistillationLoss | None = None,
    ) -> Totals:
        """Sum over all ranks: with the gradient's norm, the step's one wait for the device.

        Args:
            sums: of each of this rank's micro-batches, as the PackedStep returned them.
            grad_norm: the gradient's norm on this rank; the first rank's counts.
            mtp: whether `sums` have the loss of multi-token prediction.
            reported: the loss that they are of, where it has metrics of its own.
        """
        of_loss = () if reported is None else reported.names
        names = ("nll", "labels", "weight", *(("mtp_nll",) if mtp else ()), *of_loss)
        mine = [0.0] * len(names)
        if world.counts_loss and sums:
            mine = [
                float(sum(one[name].double() for one in sums)) for name in names
            ]  # exact, so in any order
        host = [counts.real, counts.total] if world.counts_data else [0, 0]
        norm = [grad_norm if world.is_main else 0.0]  # one rank's, so that all decide by the same number
        everything = world.sum([*host, *norm, *mine]) if world.size > 1 else [*host, *norm, *mine]
        real, total, grad_norm, nll, labels, weight, *further = everything
        weight = weight or 1.0  # no label at all
        if reported is not None:
            means = reported.means(dict(zip(of_loss, further, strict=True)), weight)
            return cls(real, total, nll / weight, labels, grad_norm, None, means)
        mtp_loss = further[0] / weight if further else None
        return cls(real, total, nll / weight, labels, grad_norm, mtp_loss)


def step_record(step: int, totals: Totals, lr: float, waited: float, seconds: float) -> dict[str, Any]:
    """A step's line of train.jsonl. `waited`: seconds of its `seconds` that it waited for data."""
    record = {
        "step": step,
        "loss": totals.loss,
        "grad_norm": totals.grad_norm,
        "lr": lr,
        "real_tokens": int(totals.real),
        "pad_fraction": 1.0 - totals.real / max(totals.total, 1),
        "labels": int(totals.labels),
        "step_ms": seconds * 1e3,
        "data_ms": waited * 1e3,
        "data_wait": waited / seconds,
        **totals.further,
    }
    return record if totals.mtp_loss is None else {**record, "mtp_loss": totals.mtp_loss}


def expert_metrics(config: Any, step: int, micro_batches: int) -> dict[str, float]:
    """Load-balance metrics of the MoE layers of a step; 1.0 is perfectly balanced. `config`: megatron-core's of the model."""
    if not config.num_moe_experts:
        return {}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    losses = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    names = [name for name, coefficient in losses.items() if coefficient]
    if not names:
        return {}
    totals: dict[str, torch.Tensor] = {}
    get_moe_metrics_tracker().report(
        loss_scale=1.0 / micro_batches,
        iteration=step,
        force_initialize=True,
        track_names=names,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
        total_loss_dict=totals,
    )
    return {f"moe_{name}": float(value) for name, value in totals.items()}
