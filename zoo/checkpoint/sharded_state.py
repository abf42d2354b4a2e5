"""What a checkpoint holds of a run: which pieces this rank writes, and which it wants back.

Each rank writes what it holds. The distributed optimizer gives a rank ranges of parameters; it writes the weights of these
ranges, what completes bf16 ones to fp32, and the moments, so that data-parallel ranks share the work. What no optimizer
updates (frozen parameters) is shared out by place, buffers go with the first rank that has them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint.storage.index import Index
from zoo.checkpoint.storage.pieces import Box, Piece, boxes, flat, whole
from zoo.checkpoint.storage.reading import fill
from zoo.model.lora import Adapters
from zoo.nn.adamw.state import CHUNK, MASTER, Moment, join
from zoo.nn.kernels import has_triton
from zoo.parallel.megatron.inner_optimizer import held_ranges
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World

_STATE = "optimizer.state"
_REST = "remainder"  # what completes bf16 weights to fp32
_AT_ONCE = 2**28  # bytes of state that are read before they are converted
_SHARED_OUT = 2**20  # bytes of a frozen parameter that several ranks write


@dataclass(frozen=True)
class Trainable:
    """What a checkpoint holds, beside plain values: DDP-wrapped chunks, optimizer, schedule."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    adapters: Adapters | None = None  # these alone are kept, where there are some


@dataclass
class Held:
    """Pieces, and objects that are no tensors (what modules keep beside them) by key."""

    pieces: list[Piece] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Range:
    """This rank's range of a parameter in a distributed optimizer: from which element on, and the optimizer's view of it."""

    start: int
    optimizer: Any  # zoo.optim.adamw.AdamW
    part: Tensor

    def complete(self, remainder: Tensor) -> None:
        """Add the bits to fp32 weights that those of a bf16 run lack."""
        self.part.detach().copy_(join(self.part.detach().bfloat16(), remainder))


def _described(modules: Sequence[Any], adapters: Adapters | None, world: World) -> Iterator[tuple[Any, str, Any]]:
    """megatron-core's description of every tensor and object: the module that has it, its name there, the description.

    Of adapters alone, where there are some.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    if adapters is not None:
        parts = [(None, adapters.sharded())]
    else:
        metadata = {"dp_cp_group": world.groups.dp_cp}
        parts = [(module, module.sharded_state_dict(metadata=metadata)) for module in modules]
    for module, state in parts:
        for name, entry in state.items():
            if isinstance(entry, ShardedBase):
                yield module, name, entry


def _tensors(modules: Sequence[Any], adapters: Adapters | None, world: World) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    entries = [entry for _, _, entry in _described(modules, adapters, world)]
    return [entry for entry in entries if not isinstance(entry, ShardedObject)]


def to_write(trainable: Trainable, world: World, *, optimizer: bool = True) -> Held:
    """What this rank writes, without the `optimizer`'s state where it is False; together the ranks write everything once."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica

    settle_all()
    held, ranges, updated = Held(), _ranges(trainable.optimizer), _updated(trainable.optimizer)
    for _, _, entry in _described([c.module for c in trainable.chunks], trainable.adapters, world):
        if isinstance(entry, ShardedObject):
            if entry.data is not None and is_main_replica(entry.replica_id):
                held.objects[entry.unique_key] = packed(entry.data)
        elif _place(entry)[0]:
            continue  # another pipeline stage or tensor-parallel rank writes it
        elif entry.data in updated:
            if entry.data in ranges:
                held.pieces += _of_range(boxes(entry), entry.data, ranges[entry.data], optimizer)
        else:
            held.pieces += _not_updated(entry, world)
    return held


def _of_range(cut: Sequence[Box], parameter: Tensor, mine: _Range, optimizer: bool) -> Iterator[Piece]:
    shape, part = tuple(parameter.shape), mine.part.detach()
    yield from flat(cut, shape, part, mine.start)
    if not optimizer:
        return
    if part.dtype == torch.bfloat16:
        yield from flat(cut, shape, mine.optimizer.state[mine.part][MASTER], mine.start, f"{_STATE}.{_REST}.")
    for name in mine.optimizer.moment_names(mine.part):
        moment: Moment = mine.optimizer.moment(mine.part, name)
        prefix = f"{_STATE}.{name}."
        if moment.exponents is None:
            yield from flat(cut, shape, moment.values, mine.start, prefix)
        else:  # bf16 has all values of 8 bits by block, whose blocks are of this rank's range alone
            read = partial(_in_bf16, moment)
            like = torch.empty(part.numel(), dtype=torch.bfloat16, device="meta")
            there = moment.values.device
            for piece in flat(cut, shape, like, mine.start, prefix):
                yield replace(piece, source=read, device=there)


def _in_bf16(moment: Moment, start: int, end: int) -> Tensor:
    if moment.values.is_cuda and has_triton():
        from zoo.nn.adamw.kernel import in_bf16

        return in_bf16(moment, start, end)
    found = torch.empty(end - start, dtype=torch.bfloat16, device=moment.values.device)
    for at in range(start, end, CHUNK):  # its temporary values take many times its memory
        found[at - start : at - start + CHUNK] = moment.read(at, min(at + CHUNK, end))
    return found


def _not_updated(entry: Any, world: World) -> Iterator[Piece]:
    """The part of a tensor that this one of its data-parallel ranks writes."""
    tensor, replica = entry.data, _place(entry)[1]
    if not isinstance(tensor, torch.nn.Parameter):
        if replica == 0:
            yield from whole(boxes(entry), tensor.detach(), steady=False)
        return
    is_expert = not getattr(tensor, "allreduce", True)
    ranks = (world.groups.expt_dp if is_expert else world.groups.dp_cp).size()
    if tensor.numel() * tensor.element_size() < _SHARED_OUT or not tensor.is_contiguous():
        if replica == 0:
            yield from whole(boxes(entry), tensor.detach())
        return
    start, end = (tensor.numel() * place // ranks for place in (replica, replica + 1))
    yield from flat(boxes(entry), tuple(tensor.shape), tensor.detach().view(-1)[start:end], start)


def _place(entry: Any) -> tuple[bool, int]:
    """Whether another pipeline stage or tensor-parallel rank is the first to hold it, and which data-parallel rank this is."""
    if isinstance(entry.replica_id, int):
        return False, entry.replica_id
    *others, replica = entry.replica_id
    return any(others), replica


def weights_wanted(modules: Sequence[Any], adapters: Adapters | None, world: World) -> list[Piece]:
    """All tensors of this rank's model chunks, or of the adapters."""
    entries = _tensors(modules, adapters, world)
    return [piece for entry in entries for piece in whole(boxes(entry), entry.data.detach())]


def cut_of_parameters(modules: Sequence[Any], world: World) -> dict[Tensor, list[Box]]:
    """How a checkpoint cuts each tensor of this rank's model chunks."""
    return {entry.data: boxes(entry) for entry in _tensors(modules, None, world)}


def objects_wanted(modules: Sequence[Any], world: World) -> list[tuple[Any, str, str]]:
    """What this rank's modules keep beside tensors: module, name there, key in the checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    described = _described(modules, None, world)
    return [
        (module, name, one.unique_key)
        for module, name, one in described
        if isinstance(one, ShardedObject) and one.data is not None
    ]


def load_optimizer(trainable: Trainable, world: World, index: Index, step: int) -> None:
    """Fill the optimizer's state of this rank's ranges, in the formats that this run has; the weights are loaded by now.

    Masters come from what completes bf16 weights or from fp32 values, whichever the checkpoint has. Parameters that were
    frozen when it was written have neither: their masters are the weights, their moments begin at zero. So do both moments of
    one that had no second moment: the first alone would make updates far too large.

    Args:
        step: how many updates the state has seen.
    """
    for one in _optimizers(trainable.optimizer):
        one.optimizer.allocate()
        one.optimizer.updates = step
    pieces: list[Piece] = []
    then: list[Callable[[], None]] = []
    for some, action in _state_wanted(trainable, world, index.tensors):
        pieces += some
        then += [action] if action else []
        if then and sum(piece.nbytes for piece in pieces) >= _AT_ONCE:
            _fill(pieces, then, index)
    _fill(pieces, then, index)


def spread_completed(trainable: Trainable) -> None:
    """Give the fp32 weights that this rank's masters have completed to the ranks that hold them, too. Every rank calls it."""
    for one in _optimizers(trainable.optimizer):
        one.optimizer.send_shared()
        one.start_param_sync_for_bucket_group_subset()
    settle_all()


def _fill(pieces: list[Piece], then: list[Callable[[], None]], index: Index) -> None:
    fill(pieces, index, direct=True)
    for action in then:
        action()
    pieces.clear()
    then.clear()


def _state_wanted(
    trainable: Trainable, world: World, there: Mapping[str, Any]
) -> Iterator[tuple[list[Piece], Callable[[], None] | None]]:
    """Pieces of this rank's state that a checkpoint has, and what is to be done once they are filled."""
    ranges = _ranges(trainable.optimizer)
    for entry in _tensors([c.module for c in trainable.chunks], trainable.adapters, world):
        if (mine := ranges.get(entry.data)) is None:
            continue
        cut, shape = boxes(entry), tuple(entry.data.shape)

        def pieces(name: str, target: Tensor, cut: Any = cut, shape: Any = shape, mine: Any = mine) -> list[Piece]:
            found = list(flat(cut, shape, target, mine.start, name and f"{_STATE}.{name}."))
            return found if all(piece.key in there for piece in found) else []

        moments = {name: mine.optimizer.moment(mine.part, name) for name in mine.optimizer.moment_names(mine.part)}
        known = all(pieces(name, moment.values) for name, moment in moments.items())
        for name, moment in moments.items():
            yield _moment_wanted(moment, partial(pieces, name) if known else lambda _: [])
        yield _master_wanted(mine, pieces, there)


def _moment_wanted(
    moment: Moment, pieces: Callable[[Tensor], list[Piece]]
) -> tuple[list[Piece], Callable[[], None] | None]:
    values = moment.values
    if not pieces(values):
        moment.zero()
        return [], None
    if moment.exponents is None:
        return pieces(values), None
    target = torch.zeros(values.numel(), device=values.device)
    return pieces(target), lambda: moment.write(target)


def _master_wanted(
    mine: _Range, pieces: Callable[[str, Tensor], list[Piece]], there: Mapping[str, Any]
) -> tuple[list[Piece], Callable[[], None] | None]:
    part = mine.part.detach()
    half = part.dtype == torch.bfloat16
    rest = mine.optimizer.state[mine.part][MASTER] if half else torch.zeros_like(part, dtype=torch.int16)
    if found := pieces(_REST, rest):
        return found, None if half else lambda: mine.complete(rest)
    if not half:
        return [], None
    if all(there[piece.key].properties.dtype == part.dtype for piece in pieces("", part)):
        rest.zero_()  # all that it has of them are bf16 weights, which are loaded by now
        return [], None
    target = torch.zeros_like(part, dtype=torch.float32)  # padding is in no checkpoint
    return pieces("", target), lambda: mine.optimizer.set_scaled_state(mine.part, MASTER, target)


def _ranges(optimizer: Any) -> dict[Tensor, _Range]:
    """This rank's range of each parameter that it updates."""
    return {
        held.parameter: _Range(held.start, one.optimizer, held.part)
        for one in _optimizers(optimizer)
        for held in held_ranges(one)
        if one.optimizer.updates_here(held.part)
    }


def _updated(optimizer: Any) -> set[Tensor]:
    """Parameters that any data-parallel rank updates."""
    return {
        parameter
        for one in _optimizers(optimizer)
        for buffer in one.buffers[: len(one.gbuf_ranges)]
        for parameter in buffer.param_index_map
    }


def _optimizers(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.chained_optimizers if not one.is_stub_optimizer]


def packed(value: Any) -> bytes:
    """An object as torch.save writes it; read back with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
