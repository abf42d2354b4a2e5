"""What a sharded model looks like to a bridge: which part of each tensor this rank has, and how parts are joined.

`ShardInfo` holds the ranks and sizes, `Comm` the two things that import and export ask of the other ranks
(gather a tensor over a group, gather a Python value over all). A lone process needs neither torch.distributed nor
groups: the defaults describe it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zoo.bridge.errors import BridgeError
from zoo.bridge.mapping.rules import PaddedRows, Sections, Shard
from zoo.errors import UserError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

Axis = Literal["tp", "ep", "etp"]
Cut = Literal["whole", "rows", "columns", "gate-up rows"]
AnyShard = Shard | Sections | PaddedRows | None  # what `Rule.shard_for` says

_CUTS: dict[Shard | None, tuple[Cut, Axis]] = {
    None: ("whole", "tp"),
    "tp0": ("rows", "tp"),
    "tp1": ("columns", "tp"),
    "tp0-gateup": ("gate-up rows", "tp"),
    "expert1": ("gate-up rows", "etp"),  # of one expert: the stack itself is cut over EP
    "expert2": ("columns", "etp"),
}


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """This rank's place in the groups that share parameters. Layers (PP) are known by their `layer_number`."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    dp_rank: int = 0  # among the replicas (DP and CP) of a dense parameter; rank 0 exports it
    edp_rank: int = 0  # among the replicas of an expert; rank 0 exports it

    @classmethod
    def from_groups(cls, groups: ProcessGroupCollection) -> ShardInfo:
        """Read a megatron.core ProcessGroupCollection (tp, ep, expt_tp, dp_cp, expt_dp)."""
        named = {"tp": groups.tp, "ep": groups.ep, "etp": groups.expt_tp}
        sizes = {f"{axis}_size": group.size() for axis, group in named.items()}
        ranks = {f"{axis}_rank": group.rank() for axis, group in named.items()}
        return cls(**ranks, **sizes, dp_rank=groups.dp_cp.rank(), edp_rank=groups.expt_dp.rank())

    def on(self, axis: Axis) -> tuple[int, int]:
        """This rank and the size of the group of `axis`."""
        return getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")


class Comm:
    """What import and export ask of the other ranks; this one has none."""

    rank = 0

    def gather(self, tensor: Tensor, axis: Axis) -> list[Tensor]:
        """The tensors of all ranks of this rank's `axis` group, in rank order; shapes are equal."""
        return [tensor]

    def gather_objects[T](self, value: T) -> list[T]:
        """The values of all ranks of the run, in rank order. Also a barrier."""
        return [value]


class TorchComm(Comm):
    """Gathers over torch.distributed: tensors over the given groups, values over the default group."""

    def __init__(self, groups: Mapping[Axis, dist.ProcessGroup] | None = None) -> None:
        self.groups = dict(groups or {})
        self.rank = dist.get_rank()

    @classmethod
    def from_groups(cls, groups: ProcessGroupCollection) -> TorchComm:
        """Take the groups of a megatron.core ProcessGroupCollection."""
        return cls({"tp": groups.tp, "ep": groups.ep, "etp": groups.expt_tp})

    def gather(self, tensor: Tensor, axis: Axis) -> list[Tensor]:
        group = self.groups[axis]
        pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return pieces

    def gather_objects[T](self, value: T) -> list[T]:
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def default_comm() -> Comm:
    """All ranks of torch.distributed where it is initialised, without groups to gather tensors over."""
    return TorchComm() if dist.is_available() and dist.is_initialized() else Comm()


def together[T](comm: Comm, action: Callable[[], T]) -> T:
    """Run `action` on every rank; where it fails on any, raise on all, with the problems of all in one report.

    Without this, a rank that fails leaves the others waiting in their next collective.
    """
    error: Exception | None = None
    seen: tuple[str, list[str], list[str]] | str | None = (
        None  # by the others: plain values, as exceptions need not pickle
    )
    results: list[T] = []
    try:
        results.append(action())
    except BridgeError as caught:
        error, seen = caught, (caught.title, caught.problems, caught.helps)
    except Exception as caught:
        kind = "" if isinstance(caught, UserError) else f"{type(caught).__name__}: "
        error, seen = caught, f"rank {comm.rank}: {kind}{caught}"
    failures = [failure for failure in comm.gather_objects(seen) if failure is not None]
    reports = [failure for failure in failures if isinstance(failure, tuple)]
    if reports:
        problems, helps = ([line for report in reports for line in report[part]] for part in (1, 2))
        raise BridgeError(reports[0][0], problems, helps)
    if error is not None:
        raise error
    if failures:
        raise UserError(failures[0])
    return results[0]


def model_parameters(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Global name and parameter of every (virtual) chunk on this rank, in the modules' order.

    Wrappers (DDP, Float16Module) are looked through. `layers.{i}` gets the global, 0-based index wherever
    the layer has Megatron-Core's 1-based `layer_number`. BridgeError where two chunks share a name.
    """
    parameters: list[tuple[str, nn.Parameter]] = []
    for chunk in chunks:
        module = chunk
        while [name for name, _ in module.named_children()] == ["module"]:
            module = module.get_submodule("module")
        renames = {}  # `decoder.layers.0.` -> `decoder.layers.24.` for each layer that knows its number
        for name, layer in module.named_modules():
            parent, _, index = name.rpartition(".")
            if index.isdigit() and hasattr(layer, "layer_number"):
                renames[f"{name}."] = f"{parent}.{layer.layer_number - 1}."
        for name, parameter in module.named_parameters():
            local = next((prefix for prefix in renames if name.startswith(prefix)), "")
            parameters.append((renames.get(local, "") + name.removeprefix(local), parameter))
    names = [name for name, _ in parameters]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise BridgeError("model chunks", [f"{name}: in more than one place of this rank" for name in sorted(twice)])
    return parameters


def shard_axis(shard: AnyShard) -> Axis:
    """The group that shares the tensors (of one expert) of a rule."""
    return _cut_of(shard)[1]


def cut(tensor: Tensor, shard: AnyShard, info: ShardInfo) -> Tensor:
    """This rank's part of a full tensor (of one expert, where the rule stacks them); a view where it can be.

    It has no rows of padding: `put` adds them.
    """
    kind, axis = _cut_of(shard)
    rank, size = info.on(axis)
    if kind == "whole" or size == 1:
        return tensor
    if isinstance(shard, PaddedRows):
        share = -(-shard.rows // size)
        return tensor[share * rank : share * (rank + 1)]
    if kind == "columns":
        return tensor.chunk(size, dim=1)[rank]
    parts = [section.chunk(size)[rank] for section in _sections(tensor, shard)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put(part: Tensor, parameter: Tensor, index: int | None = None) -> None:
    """Copy what `cut` gave into a parameter of a rank, or into one of its first axis; rows of padding behind it are zeros.

    A parameter without memory of its own has its values in an attribute `held` (`zoo.nn.decoder.frozen`), which takes them.
    """
    held = getattr(parameter, "held", None)
    if held is not None:
        held.write(part.to(parameter.dtype), index)
        return
    into = parameter if index is None else parameter[index]
    if part.shape == into.shape:
        into.copy_(part)
        return
    into[: len(part)].copy_(part)
    into[len(part) :].zero_()


def join(pieces: Sequence[Tensor], shard: AnyShard) -> Tensor:
    """The full tensor (of one expert) from the parts of all ranks, in rank order: the inverse of `cut`."""
    kind, _ = _cut_of(shard)
    if kind == "whole" or len(pieces) == 1:
        return pieces[0]
    if kind == "columns":
        return torch.cat(list(pieces), dim=1)
    if isinstance(shard, PaddedRows):
        return torch.cat(list(pieces))[: shard.rows]
    by_section = zip(*(_sections(piece, shard) for piece in pieces), strict=True)
    return torch.cat([part for parts in by_section for part in parts])


def full_shape(local: Iterable[int], shard: AnyShard, info: ShardInfo) -> tuple[int, ...]:
    """The shape of the full zoo tensor of which this rank has a part of shape `local`."""
    shape = list(local)
    kind, axis = _cut_of(shard)
    stacked = shard in ("expert1", "expert2")
    if stacked:
        shape[0] *= info.ep_size
    if kind != "whole":
        shape[(1 if kind == "columns" else 0) + stacked] *= info.on(axis)[1]
    if isinstance(shard, PaddedRows) and shard.rows <= shape[0] < shard.rows + info.tp_size:
        shape[0] = shard.rows
    return tuple(shape)


def _cut_of(shard: AnyShard) -> tuple[Cut, Axis]:
    return ("rows", "tp") if isinstance(shard, Sections | PaddedRows) else _CUTS[shard]


def _sections(tensor: Tensor, shard: AnyShard) -> list[Tensor]:
    """The sections of rows of a full tensor, or of an equal share of each in a part of it."""
    if isinstance(shard, Sections):
        share = sum(shard.sizes) // tensor.shape[0]
        return list(tensor.split([size // share for size in shard.sizes]))
    return list(tensor.chunk(2)) if _cut_of(shard)[0] == "gate-up rows" else [tensor]
