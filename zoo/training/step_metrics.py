"""Metrics of one step: the counts that the host knows before it, and the totals over all ranks after it.

Loss and gradient are those of Hugging Face under gradient accumulation: the sum of negative log likelihoods over
all labelled tokens of a global batch, divided by their number N (where they are weighted: each times its weight, and N
is the sum of the weights). N is known on the host before the forward pass (the loader exchanges it), so the scale of
every micro-batch is right at once: mcore's schedule multiplies by cp / micro-batches and its DDP averages over
dp * cp ranks, hence `Counts.loss_scale` = dp * micro-batches / N.

Whatever else the ranks have to tell each other of a step travels in one all-reduce between the backward pass and the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zoo.parallel.world import World
from zoo.steps.losses.distillation import DistillationLoss
from zoo.steps.losses.preference import AnswerLoss


@dataclass(frozen=True)
class Counts:
    """Tokens of this rank's micro-batches of one step, known to the host."""

    real: int
    total: int
    weight: float  # of the labels; their number where they are not weighted
    batches: int
    step_weight: float | None = None  # the same of all data-parallel ranks, where the loader knows it

    @classmethod
    def of(cls, batches: Sequence[Any]) -> Counts:
        """Sums over micro-batches."""
        return cls(
            sum(b.real_tokens for b in batches),
            sum(b.total for b in batches),
            sum(b.loss_weight for b in batches),
            len(batches),
            batches[0].step_weight if batches else None,
        )

    def loss_scale(self, world: World) -> torch.Tensor | float:
        """dp * micro-batches / N; where the loader doesn't know N it is a device tensor, so that the host doesn't wait."""
        known = self.weight if world.dp_size == 1 else self.step_weight
        if known is not None:
            return world.dp_size * self.batches / (known or 1.0)
        total = torch.tensor(float(self.weight), device=world.device)
        dist.all_reduce(total, group=world.groups.dp)
        return world.dp_size * self.batches / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True)
class OfRank:
    """What a rank tells the others of a step.

    Attributes:
        sums: of each of its micro-batches, as the PackedStep returned them.
        counts: its tokens.
        squares: () float64 on the device, its share of the gradient's squared norm.
        experts: by name, () float64 on the device, its share of the experts' load-balance metrics.
        parts: seconds of the step's parts (`zoo.logging.step_timer.PARTS`); called when the device has finished the backward pass.
        flags: whatever else is to be summed over the ranks; called just before the exchange.
    """

    sums: Sequence[Mapping[str, torch.Tensor]]
    counts: Counts
    squares: torch.Tensor
    experts: Mapping[str, torch.Tensor]
    parts: Callable[[], list[float]]
    flags: Callable[[], list[float]]


@dataclass(frozen=True)
class Totals:
    """Metrics of one step over all ranks."""

    real: float
    total: float
    loss: float  # nan where the step has no label
    labels: float
    grad_norm: float
    mtp_loss: float | None
    further: Mapping[str, float]  # what a loss has to say beside
    experts: Mapping[str, float]  # load-balance metrics; 1.0 is perfectly balanced
    parts: list[list[float]]  # by rank: seconds of the step's parts
    flags: list[float]  # how many ranks have set each

    @classmethod
    def of(
        cls, mine: OfRank, world: World, *, mtp: bool, reported: AnswerLoss | DistillationLoss | None = None
    ) -> Totals:
        """Sum over all ranks: the step's one wait for the device, and its one exchange but for those of layers and gradients.

        Args:
            mine: of this rank.
            mtp: whether its `sums` have the loss of multi-token prediction.
            reported: the loss that they are of, where it has metrics of its own.
        """
        of_loss = () if reported is None else reported.names
        names = ("nll", "labels", "weight", *(("mtp_nll",) if mtp else ()), *of_loss)
        counts, nothing = mine.counts, torch.zeros_like(mine.squares)
        sums = [nothing] * len(names)
        if world.counts_loss and mine.sums:
            # exact, so in any order
            sums = [torch.stack([one[name].double() for one in mine.sums]).sum() for name in names]
        on_device: list[float] = torch.stack([mine.squares, *mine.experts.values(), *sums]).tolist()
        host = [counts.real, counts.total] if world.counts_data else [0, 0]
        parts, flags = mine.parts(), mine.flags()
        ranks = range(world.size)
        by_rank = [seconds * (rank == world.rank) for rank in ranks for seconds in parts]
        values = [*on_device, *host, *by_rank, *flags]
        values = world.sum(values) if world.size > 1 else values
        found = iter(values)
        norm = math.sqrt(next(found))
        experts = {name: next(found) for name in mine.experts}
        loss = {name: next(found) for name in names}
        real, total = next(found), next(found)
        everyone = [[next(found) for _ in parts] for _ in ranks]
        weight = loss["weight"] or math.nan
        further = {} if reported is None else reported.means({name: loss[name] for name in of_loss}, weight)
        mtp_loss = loss["mtp_nll"] / weight if mtp and reported is None else None
        mean = loss["nll"] / weight
        return cls(real, total, mean, loss["labels"], norm, mtp_loss, further, experts, everyone, list(found))


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
        **totals.experts,
    }
    return record if totals.mtp_loss is None else {**record, "mtp_loss": totals.mtp_loss}


def expert_shares(config: Any, world: World, micro_batches: int) -> dict[str, torch.Tensor]:
    """By name, () float64: this rank's shares of the load-balance metrics of a step's MoE layers, which the ranks' sum completes.

    They are means over layers and micro-batches. `config`: megatron-core's of the model.
    """
    if not config.num_moe_experts:
        return {}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    losses = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    tracker, found = get_moe_metrics_tracker(), {}
    for name in (name for name, coefficient in losses.items() if coefficient):
        entry = tracker.metrics.get(name)
        if entry is None:  # a pipeline stage without experts
            share = torch.zeros((), dtype=torch.float64, device=world.device)
        else:
            share = entry.values.double().sum() / (micro_batches * _expert_layers(config) * _alike(entry, world))
        found[f"moe_{name}"] = share
    tracker.clear()
    return found


def _expert_layers(config: Any) -> int:
    every = config.moe_layer_freq
    layers = len(range(0, config.num_layers, every)) if isinstance(every, int) else sum(every)
    return int(layers) + (config.mtp_num_layers or 0)


def _alike(entry: Any, world: World) -> int:
    """How many ranks' values of a pipeline stage a metric is a mean of; the others are parts of a sum."""
    if entry.avg_group is not None:
        return int(entry.avg_group.size())
    copies = 1 if entry.reduce_group is not None else world.size // (world.dp_size * world.pp_size)
    return copies * (world.dp_size if entry.needs_dp_avg else 1)
