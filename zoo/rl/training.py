"""Gradients of a caller's loss, and updates of the weights by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zoo.config.schema import Recipe
from zoo.model import lora
from zoo.optim import adamw
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World
from zoo.rl.batch import PaddedRows
from zoo.rl.checkpoints import Counts
from zoo.rl.parts import EngineParts
from zoo.rl.passes import LossFunction, Passes
from zoo.types import JsonMapping


@dataclass(frozen=True)
class StepOutcome:
    """What came of one `zoo.Engine.train_step`, the same on every rank.

    Attributes:
        loss: `loss_scale` times the sum of the loss over all micro-batches and replicas.
        tokens: tokens whose log-probabilities were asked for, of all replicas.
        micro_batches: of this rank.
        metrics: sums over all micro-batches and replicas of what `loss_fn` returned beside the loss.
        grad_norm: norm of the whole gradient before it is clipped; None where no update was asked for.
        applied: whether the weights were updated; no token at all, or a loss or gradient that is not finite, leaves them as they were.
        lr: learning rate of the next update.
    """

    loss: float
    tokens: int
    micro_batches: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    applied: bool = False
    lr: float = 0.0


@dataclass
class Training:
    """Takes steps with a model that is under DDP and has an optimizer."""

    recipe: Recipe
    world: World
    parts: EngineParts
    passes: Passes
    counts: Counts = field(default_factory=Counts)  # what has been done so far
    tokens: int = 0  # that the gradients at hand are of, of all replicas

    def step(
        self, rows: PaddedRows, loss_fn: LossFunction, scale: float | None, *, entropy: bool, update: bool
    ) -> StepOutcome:
        """Gradients of the loss, and an update by them; `scale` None: 1 / tokens."""
        tokens = rows.targets
        if self.world.dp_size > 1:
            total = torch.tensor(tokens, device=self.world.device)
            dist.all_reduce(total, group=self.world.groups.dp)
            tokens = int(total)
        scale = 1.0 / max(tokens, 1) if scale is None else float(scale)
        self.clear()
        lora.seed_dropout(self.recipe, self.counts.train_steps, self.world)
        self.counts.train_steps += 1
        self.tokens = tokens
        outputs, count = self.passes.gradients(rows, loss_fn, scale, entropy=entropy)
        totals = self._totals(outputs)
        loss = totals.pop("loss", 0.0)
        norm, applied = self.update(loss) if update else (None, False)
        return StepOutcome(loss, tokens, count, totals, norm, applied, self.learning_rate)

    def update(self, loss: float = 0.0, *, advance: bool = True) -> tuple[float, bool]:
        """Update the weights by the gradients at hand, unless these are of no token, or they or the loss are not finite.

        Gradients are zero afterwards. `advance`: the schedule moves by one before an update.
        """
        optimizer = self.parts.optimizer
        settle_all()
        adamw.prepare(optimizer)
        norm = float(optimizer.get_grad_norm())
        applied = self.tokens > 0 and math.isfinite(norm) and math.isfinite(loss)
        if applied:
            if advance:
                self.parts.scheduler.step(increment=1)
            adamw.clip(optimizer, norm)
            optimizer.step_with_ready_grads()
        self.counts.updates += applied
        settle_all()  # a loop reads weights as it likes
        self.clear()
        return norm, applied

    @property
    def learning_rate(self) -> float:
        """That of the next update, as the schedule stands."""
        rate: float = self.parts.scheduler.get_lr({})
        return rate

    def advance(self) -> float:
        """Move the schedule by one; the learning rate that it gives now."""
        self.parts.scheduler.step(increment=1)
        return self.learning_rate

    def clear(self) -> None:
        """Make all gradients zero."""
        for chunk in self.parts.chunks:
            chunk.zero_grad_buffer()  # the optimizer has views of it alone, which it keeps
        self.tokens = 0

    def _totals(self, outputs: Sequence[JsonMapping]) -> dict[str, float]:
        """Sums over this rank's micro-batches and over replicas, of each of which one rank counts."""
        local_sums: dict[str, float] = {}
        if self.world.counts_loss and self.world.cp_rank == 0:
            for metrics in outputs:
                for name, value in metrics.items():
                    local_sums[name] = local_sums.get(name, 0.0) + float(value)
        everyone: list[dict[str, float]] = [local_sums]
        if self.world.size > 1:
            everyone = [{} for _ in range(self.world.size)]
            dist.all_gather_object(everyone, local_sums)
        names = dict.fromkeys(name for metrics in everyone for name in metrics)
        return {name: sum(metrics.get(name, 0.0) for metrics in everyone) for name in names}
