"""Metrics of one step: the counts that the host knows before it, and the totals over all ranks after it.

Loss and gradient are those of Hugging Face under gradient accumulation: the sum of negative log likelihoods over
all labelled tokens of a global batch, divided by their number N (where they are weighted: each times its weight, and N
is the sum of the weights). N is known on the host before the forward pass (the loader exchanges it), so the scale of
every micro-batch is right at once: mcore's schedule multiplies by cp / micro-batches and its DDP averages over
dp * cp ranks, hence `TokenCounts.loss_scale` = dp * micro-batches / N.

Whatever else the ranks have to tell each other of a step travels in one all-reduce between the backward pass and the update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from zoo.data.sample import MicroBatch
from zoo.parallel.world import World
from zoo.steps.objectives.policy import LOGGED
from zoo.steps.packed_step import PackedStep
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

type LossSums = Mapping[str, torch.Tensor]
"""Sums of a micro-batch's loss by name (nll, labels, weight ...), as the PackedStep returned them."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of this rank's micro-batches of one step, known to the host."""

    real: int
    total: int
    weight: float  # of the labels; their number where they are not weighted
    batches: int
    step_weight: float | None = None  # the same of all data-parallel ranks, where the loader knows it
    by_source: Mapping[str, int] = field(
        default_factory=dict
    )  # real tokens by the entry of data.train that rows are of

    @classmethod
    def from_micro_batches(cls, batches: Sequence[MicroBatch], sources: Sequence[str] = ()) -> TokenCounts:
        """Sums over micro-batches; `sources`: entries whose tokens are counted apart (`sources_of`), the same on all ranks."""
        return cls(
            sum(b.real_tokens for b in batches),
            sum(b.total for b in batches),
            sum(b.loss_weight for b in batches),
            len(batches),
            batches[0].step_weight if batches else None,
            _tokens_by_source(batches, sources),
        )

    def loss_scale(self, world: World) -> torch.Tensor | float:
        """dp * micro-batches / N; where the loader doesn't know N it is a device tensor, so that the host doesn't wait."""
        known = self.weight if world.dp_size == 1 and self.step_weight is None else self.step_weight
        if known is not None:
            return world.dp_size * self.batches / (known or 1.0)
        total = torch.tensor(float(self.weight), device=world.device)
        dist.all_reduce(total, group=world.groups.dp)
        return world.dp_size * self.batches / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True)
class StepTotals:
    """Metrics of one step over all ranks."""

    real: float
    total: float
    loss: float  # nan where the step has no label
    labels: float
    grad_norm: float
    mtp_loss: float | None
    further: Mapping[str, float]  # metrics of the loss's own
    experts: Mapping[str, float]  # load-balance metrics; 1.0 is perfectly balanced
    part_norms: Mapping[str, float]  # of the gradient, by part of the model; none in most steps
    by_source: Mapping[str, float]  # real tokens by entry of data.train, where there are several
    parts: np.ndarray  # (ranks, parts) seconds
    flags: list[float]  # how many ranks have set each

    @classmethod
    def gather(
        cls,
        loss_sums: Sequence[LossSums],
        counts: TokenCounts,
        *,
        squared_norm: torch.Tensor,
        expert_shares: Mapping[str, torch.Tensor],
        parts: Callable[[], list[float]],
        flags: Callable[[], list[float]],
        step: PackedStep,
        world: World,
        part_squares: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> StepTotals:
        """Sum over all ranks: the step's one wait for the device, and its one exchange but for those of layers and gradients.

        Args:
            loss_sums: of each of this rank's micro-batches, as `step` returned them.
            counts: this rank's tokens.
            squared_norm: () float64 on the device, this rank's share of the gradient's squared norm.
            expert_shares: by name, () float64 on the device, this rank's share of the experts' load-balance metrics.
            parts: seconds of the step's parts (`zoo.logging.step_timer.PARTS`); called when the device has finished.
            flags: whatever else is to be summed over the ranks; called just before the exchange.
            part_squares: by part of the model, as `squared_norm` (`PartNorms.squares`); the same parts on all ranks.
        """
        mtp = bool(step.mtp_depths)
        loss_with_metrics = step.preference or step.distillation or step.policy or step.speech or step.retrieval
        own_names = () if loss_with_metrics is None else loss_with_metrics.names
        maxima = () if step.policy is None else step.policy.maxima
        names = ("nll", "labels", "weight", *(("mtp_nll",) if mtp else ()), *own_names)
        totals = [torch.zeros_like(squared_norm)] * len(names)
        if world.counts_loss and loss_sums:  # in fp64, so exact in any order
            totals = [torch.stack([by_name[name].double() for by_name in loss_sums]).sum() for name in names]
        largest = [torch.zeros_like(squared_norm)] * len(maxima)
        if world.counts_loss and loss_sums:
            largest = [torch.stack([by_name[name].double() for by_name in loss_sums]).max() for name in maxima]
        shares = (*expert_shares.values(), *part_squares.values())
        on_device: list[float] = torch.stack([squared_norm, *shares, *totals, *largest]).tolist()
        of_device, of_rank = on_device[: len(on_device) - len(maxima)], on_device[len(on_device) - len(maxima) :]
        tokens = [counts.real, counts.total, *counts.by_source.values()]
        tokens = tokens if world.counts_data else [0] * len(tokens)
        seconds = parts()
        by_rank = np.zeros((world.size, len(of_rank) + len(seconds)))
        by_rank[world.rank] = *of_rank, *seconds
        values = np.concatenate([[*of_device, *tokens, *flags()], by_rank.ravel()])
        values = world.sum_array(values) if world.size > 1 else values
        summed, by_rank = iter(values[: -by_rank.size].tolist()), values[-by_rank.size :].reshape(by_rank.shape)

        grad_norm = math.sqrt(next(summed))
        experts = {name: next(summed) for name in expert_shares}
        part_norms = {part: math.sqrt(next(summed)) for part in part_squares}
        loss = {name: next(summed) for name in names}
        weight = (loss["weight"] if step.policy is None else counts.step_weight) or math.nan
        further: Mapping[str, float] = {}
        if loss_with_metrics is not None:
            further = loss_with_metrics.means({name: loss[name] for name in own_names}, weight)
        real, total = next(summed), next(summed)
        by_source = {name: next(summed) for name in counts.by_source}
        for number, name in enumerate(maxima):
            largest_of_all = float(by_rank[:, number].max())
            further = {**further, LOGGED[name]: largest_of_all if loss["labels"] else math.nan}
        return cls(
            real=real,
            total=total,
            by_source=by_source,
            loss=loss["nll"] / weight,
            labels=loss["labels"],
            grad_norm=grad_norm,
            mtp_loss=loss["mtp_nll"] / weight if mtp and loss_with_metrics is None else None,
            further=further,
            experts=experts,
            part_norms=part_norms,
            parts=by_rank[:, len(maxima) :],
            flags=list(summed),
        )

    def record(self, step: int, lr: float, seconds: float, of_loader: JsonMapping = MappingProxyType({})) -> JsonObject:
        """A step's line of train.jsonl; `of_loader`: metrics of a loader's own, of a rollout."""
        waited = float(self.parts[:, 0].max())  # for data; the other ranks wait for that one
        return {
            "step": step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": lr,
            "real_tokens": int(self.real),
            "pad_fraction": 1.0 - self.real / max(self.total, 1),
            "labels": int(self.labels),
            "step_ms": seconds * 1e3,
            "data_ms": waited * 1e3,
            "data_wait": waited / seconds,
            **self.further,
            **self.experts,
            **{f"grad_norm_{part}": norm for part, norm in self.part_norms.items()},
            **{f"share_{name}": tokens / max(self.real, 1) for name, tokens in _short(self.by_source).items()},
            **({} if self.mtp_loss is None else {"mtp_loss": self.mtp_loss}),
            **of_loader,
            **({"update_seconds": round(seconds - waited, 4)} if of_loader else {}),
        }


def sources_of(names: Sequence[str]) -> tuple[str, ...]:
    """The entries whose shares of the tokens are counted: all, each once, where there are several."""
    distinct = tuple(dict.fromkeys(names))
    return distinct if len(distinct) > 1 else ()


def _tokens_by_source(batches: Sequence[MicroBatch], sources: Sequence[str]) -> dict[str, int]:
    """Real tokens by the name of the entry, which stands before the row's number in `MicroBatch.sources`."""
    tokens: Counter[str] = Counter()
    for batch in batches if sources else ():
        for source, length in zip(batch.sources, batch.lengths, strict=False):  # a filler has no sources
            tokens[source.rpartition(":")[0]] += length
    return {name: tokens[name] for name in sources}


def _short(by_name: Mapping[str, float]) -> dict[str, float]:
    """The same by the last part of each path, where that tells the names apart."""
    last = {name: PurePath(name).name for name in by_name}
    distinct = len(set(last.values())) == len(last)
    return {last[name] if distinct else name: value for name, value in by_name.items()}


def expert_shares(model: MegatronModule, world: World, micro_batches: int) -> dict[str, torch.Tensor]:
    """By name, () float64: this rank's shares of the load-balance metrics of a step's MoE layers, which the ranks' sum completes.

    They are means over layers and micro-batches. `model`: a chunk of the one that is trained.
    """
    from megatron.core.utils import get_attr_wrapped_model

    configs: Sequence[TransformerConfig] = get_attr_wrapped_model(model, "routed_configs")
    config = configs[0]
    if not config.num_moe_experts:
        return {}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    losses = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    layers = sum(map(_routed_layers, configs))
    tracker, shares = get_moe_metrics_tracker(), {}
    for name in (name for name, coefficient in losses.items() if coefficient):
        entry = tracker.metrics.get(name)
        if entry is None:  # a pipeline stage without experts
            share = torch.zeros((), dtype=torch.float64, device=world.device)
        else:
            # How many ranks of a pipeline stage have the same value; the others have parts of a sum.
            if entry.avg_group is not None:
                copies = entry.avg_group.size()
            else:
                copies = 1 if entry.reduce_group is not None else world.size // (world.dp_size * world.pp_size)
                copies *= world.dp_size if entry.needs_dp_avg else 1
            share = entry.values.double().sum() / (micro_batches * layers * copies)
        shares[f"moe_{name}"] = share
    tracker.clear()
    return shares


def _routed_layers(config: TransformerConfig) -> int:
    """Layers with experts."""
    every = config.moe_layer_freq
    layers = len(range(0, config.num_layers, every)) if isinstance(every, int) else sum(every)
    return layers + (config.mtp_num_layers or 0)
