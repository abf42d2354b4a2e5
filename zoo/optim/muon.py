"""Muon for the matrices of a model and AdamW for its other weights, in megatron-core's distributed optimizer.

Both have one schedule, one weight decay and the formats of `zoo.nn.adamw.state`. Muon's momentum is held as AdamW's first
moment is, under its name: both are averages of gradients. There is no second moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.bridge import Dims
from zoo.bridge.parallel import Axis, ShardInfo, model_parameters
from zoo.model.matrices import is_matrix, matrices_of
from zoo.nn.adamw.state import MASTER, MOMENTS, join, split
from zoo.nn.muon import advance, rms_scale
from zoo.optim.adamw import AdamW
from zoo.optim.exchange import Exchange, Matrix, Parameter
from zoo.parallel.megatron.inner_optimizer import held_ranges, ranges_of
from zoo.parallel.world import World
from zoo.registry import ModelFamily

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer
    from torch.optim.optimizer import ParamsT


type ByParameter = dict[Tensor, dict[str, Any]]  # the optimizer's group that each is in


@dataclass(frozen=True)
class Shard:
    """This rank's range of a parameter with matrices: the optimizer's view of it, and its first element."""

    part: Tensor
    start: int


class Muon(AdamW):
    """`AdamW`, and Muon for the parameters that `share_out` has given it.

    Attributes:
        momentum: of the moving average of gradients.
        lr_scale: factor of the learning rate for matrices.
    """

    def __init__(self, params: ParamsT, *, momentum: float, lr_scale: float = 1.0, **options: Any) -> None:
        super().__init__(params, **options)
        self.momentum, self.lr_scale = momentum, lr_scale
        self._exchanges: list[tuple[Exchange, dict[int, Shard]]] = []
        self._matrices: set[Tensor] = set()

    def take(self, exchange: Exchange, shards: dict[int, Shard]) -> None:
        """Update the matrices of an exchange with Muon; `shards`: what this rank holds, by index of the parameter."""
        self._exchanges.append((exchange, shards))
        self._matrices |= {shard.part for shard in shards.values()}

    def moment_names(self, parameter: Tensor) -> tuple[str, ...]:
        """A matrix has a momentum alone."""
        return MOMENTS[:1] if parameter in self._matrices else MOMENTS

    def updates_by_element(self, parameter: Tensor) -> bool:
        """Whether AdamW updates a parameter."""
        return parameter not in self._matrices

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # PyTorch's has a closure's loss
        """Make the update of all weights."""
        if self._parts is None:
            self.prepare()
        count, clip = self.updates + 1, self.clip
        super().step(closure)
        groups = {part: group for group in self.param_groups for part in group["params"]}
        for exchange, shards in self._exchanges:
            for batch in exchange.batches:
                self._update(exchange, batch, shards, groups, count, clip)

    def _update(
        self,
        exchange: Exchange,
        batch: Sequence[Matrix],
        shards: dict[int, Shard],
        groups: ByParameter,
        count: int,
        clip: float,
    ) -> None:
        local_shards = {
            index: shards[index] for index in dict.fromkeys(matrix.index for matrix in batch) if index in shards
        }
        held: dict[int, tuple[int, Tensor]] = {}
        weights: dict[int, Tensor] = {}
        for index, shard in local_shards.items():
            part, group = shard.part, groups[shard.part]
            ahead = advance(
                self.moment(part, MOMENTS[0]),
                part.decoupled_grad,  # type: ignore[attr-defined]  # prepare_grads sets it
                momentum=self.momentum,
                clip=clip,
                seed=self._seeds[part],
                step=count,
            )
            held[index] = shard.start, ahead
            half = part.dtype == torch.bfloat16
            weight = join(part.detach(), self.state[part][MASTER]) if half else part.detach()
            weights[index] = weight.mul_(1.0 - self.lr_scale * group["lr"] * group["weight_decay"])
        by_rate: dict[float, list[tuple[Tensor, Tensor]]] = {}
        for update in exchange.orthogonalize(batch, held):
            shard = local_shards[update.index]
            lr = self.lr_scale * groups[shard.part]["lr"]
            piece = weights[update.index][update.first - shard.start : update.end - shard.start]
            by_rate.setdefault(lr * rms_scale(*update.shape), []).append((piece, update.values))
        for rate, pairs in by_rate.items():
            torch._foreach_add_([piece for piece, _ in pairs], [values for _, values in pairs], alpha=-rate)
        for index, shard in local_shards.items():
            if shard.part.dtype == torch.bfloat16:
                rounded, remainder = split(weights[index])
                shard.part.detach().copy_(rounded)
                self.state[shard.part][MASTER].copy_(remainder)


def counts(chunks: Sequence[torch.nn.Module]) -> tuple[int, int]:
    """Trained weights of this rank that Muon updates, and all of them."""
    trained = [(name, p) for name, p in model_parameters(chunks) if p.requires_grad]
    return sum(p.numel() for name, p in trained if is_matrix(name, p)), sum(p.numel() for _, p in trained)


def share_out(
    optimizer: ChainedOptimizer, chunks: Sequence[torch.nn.Module], family: ModelFamily, dims: Dims, world: World
) -> None:
    """Give each of the chained optimizers the matrices among its parameters. Every rank calls it, before any update."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model_parameters(chunks)}
    bridge, info = family.load("bridge"), ShardInfo.from_groups(world.groups)
    groups = {"tp": world.groups.tp_dp_cp, "etp": _expert_group(world, info) if info.etp_size > 1 else None}
    for chained in optimizer.chained_optimizers:
        if chained.is_stub_optimizer:
            continue
        by_axis: dict[Axis | None, dict[Tensor, Parameter]] = {}
        for parameter, ranges in ranges_of(chained):
            name = names[parameter]
            if is_matrix(name, parameter):
                matrices = matrices_of(name, parameter, bridge, dims, info)
                described = Parameter(matrices, parameter.numel(), ranges)
                by_axis.setdefault(matrices.axis, {})[parameter] = described
        held = {held_range.parameter: Shard(held_range.part, held_range.start) for held_range in held_ranges(chained)}
        for axis in sorted(by_axis, key=str):
            group = groups[axis] if axis else chained.data_parallel_group
            rank_coordinates = (info.on(axis)[0] if axis else 0, chained.data_parallel_group.rank())
            coordinates = [rank_coordinates] * group.size()
            dist.all_gather_object(coordinates, rank_coordinates, group=group)
            shards = {index: held[p] for index, p in enumerate(by_axis[axis]) if p in held}
            narrowest = min(by_axis[axis], key=lambda chained: chained.dtype.itemsize)
            exchange = Exchange(group, coordinates, list(by_axis[axis].values()), narrowest)
            chained.optimizer.take(exchange, shards)


def _expert_group(world: World, info: ShardInfo) -> dist.ProcessGroup | None:
    """The ranks that hold the same experts, cut over expert tensor parallelism and over replicas; Megatron-Core has no such group."""
    own = (world.pp_rank, info.ep_rank)
    everyone = [own] * world.size
    dist.all_gather_object(everyone, own)
    own_group = None
    for coordinates in sorted(set(everyone)):
        group = dist.new_group([rank for rank in range(world.size) if everyone[rank] == coordinates])
        own_group = group if coordinates == own else own_group
    return own_group


def maker(momentum: float, lr_scale: float) -> Callable[..., Muon]:
    """What makes the inner optimizers: `Muon` with this momentum and factor of the learning rate."""
    return lambda params, **options: Muon(params, momentum=momentum, lr_scale=lr_scale, **options)
