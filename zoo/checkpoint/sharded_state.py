"""What a checkpoint holds of a run: which pieces this rank writes, and which it wants back.

Each rank writes what it holds. The distributed optimizer gives a rank ranges of parameters; it writes the weights of these
ranges, what completes bf16 ones to fp32, and the moments, so that data-parallel ranks share the work. Parameters that no
optimizer updates (frozen ones) are divided among the replicas; the first rank that has a buffer writes it.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from zoo.checkpoint.storage.index import Index
from zoo.checkpoint.storage.pieces import Box, Piece, boxes, flat, whole
from zoo.checkpoint.storage.reading import fill
from zoo.model.lora import Adapters
from zoo.nn.adamw.state import CHUNK, MASTER, Moment, join
from zoo.nn.kernels import has_triton
from zoo.parallel.megatron.inner_optimizer import held_ranges
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import MegatronModule
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from zoo.optim.adamw import AdamW

_OPTIMIZER = "optimizer."  # prefix of the keys of its state
_STATE = f"{_OPTIMIZER}state"
_REST = "remainder"  # what completes bf16 weights to fp32
_READ_AT_ONCE = 2**28  # bytes of state that are read before they are converted
_DIVIDED = 2**20  # bytes of a frozen parameter that several ranks write

type Wanted = tuple[list[Piece], Callable[[], object] | None]
"""Pieces to fill, and what is to be done once they are filled."""


@dataclass(frozen=True)
class Trainable:
    """What a checkpoint holds next to plain values: DDP-wrapped chunks, optimizer, schedule."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: ChainedOptimizer
    scheduler: OptimizerParamScheduler
    adapters: Adapters | None = None  # only these are written, where there are some

    @property
    def modules(self) -> list[MegatronModule]:
        """The chunks without DDP."""
        return [chunk.module for chunk in self.chunks]

    @property
    def optimizers(self) -> list[DistributedOptimizer]:
        """The optimizers of the chain that have parameters."""
        return [each for each in self.optimizer.chained_optimizers if not each.is_stub_optimizer]


@dataclass
class RankState:
    """The pieces that a rank writes, and objects that are no tensors (what modules keep next to them) by key."""

    pieces: list[Piece] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Range:
    """This rank's range of a parameter in a distributed optimizer: its first element, and the optimizer's view of it."""

    start: int
    optimizer: AdamW
    part: Tensor


def _described(
    modules: Sequence[MegatronModule], adapters: Adapters | None, world: World
) -> Iterator[tuple[MegatronModule | None, str, ShardedBase]]:
    """megatron-core's description of every tensor and object: its module, its name there, the description.

    Only those of the adapters, where there are some; they have no module.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    if adapters is not None:
        states = [(None, adapters.sharded())]
    else:
        metadata = {"dp_cp_group": world.groups.dp_cp}
        states = [(module, module.sharded_state_dict(metadata=metadata)) for module in modules]
    for module, state in states:
        for name, entry in state.items():
            if isinstance(entry, ShardedBase):
                yield module, name, entry


def _tensors(modules: Sequence[MegatronModule], adapters: Adapters | None, world: World) -> list[ShardedTensor]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    described = _described(modules, adapters, world)
    return [entry for _, _, entry in described if not isinstance(entry, ShardedObject)]


def to_write(trainable: Trainable, world: World, *, optimizer: bool = True) -> RankState:
    """What this rank writes, without the `optimizer`'s state where it is False; together the ranks write everything once.

    Weights come first, so that ranks that need only them read no optimizer state.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica

    settle_all()
    state, ranges = RankState(), _ranges(trainable)
    updated = {
        parameter
        for each in trainable.optimizers
        for buffer in each.buffers[: len(each.gbuf_ranges)]
        for parameter in buffer.param_index_map
    }
    for _, _, entry in _described(trainable.modules, trainable.adapters, world):
        if isinstance(entry, ShardedObject):
            if entry.data is not None and is_main_replica(entry.replica_id):
                state.objects[entry.unique_key] = packed(entry.data)
            continue
        *model_ranks, replica = (entry.replica_id,) if isinstance(entry.replica_id, int) else entry.replica_id
        if any(model_ranks):
            continue  # another pipeline stage or tensor-parallel rank writes it
        if entry.data not in updated:
            state.pieces += _not_updated(entry, replica, world)
        elif entry.data in ranges:
            state.pieces += _updated(boxes(entry), entry.data, ranges[entry.data], optimizer)
    state.pieces.sort(key=lambda piece: piece.key.startswith(_OPTIMIZER))
    state.objects[key_of(world.rank, world.size)] = packed(random_state())
    return state


def _updated(cut: Sequence[Box], parameter: Tensor, held_range: _Range, optimizer: bool) -> Iterator[Piece]:
    """The weights of this rank's range of a parameter, and the `optimizer`'s state of them."""
    shape, part = tuple(parameter.shape), held_range.part.detach()
    yield from flat(cut, shape, part, held_range.start)
    if not optimizer:
        return
    if part.dtype == torch.bfloat16:
        rest = held_range.optimizer.state[held_range.part][MASTER]
        yield from flat(cut, shape, rest, held_range.start, f"{_STATE}.{_REST}.")
    for name in held_range.optimizer.moment_names(held_range.part):
        moment: Moment = held_range.optimizer.moment(held_range.part, name)
        prefix = f"{_STATE}.{name}."
        if moment.exponents is None:
            yield from flat(cut, shape, moment.values, held_range.start, prefix)
        else:  # bf16 has all values of 8 bits by block, whose blocks are of this rank's range alone
            read = partial(_in_bf16, moment)
            like = torch.empty(part.numel(), dtype=torch.bfloat16, device="meta")
            for piece in flat(cut, shape, like, held_range.start, prefix):
                yield replace(piece, source=read, device=moment.values.device)


def _in_bf16(moment: Moment, start: int, end: int) -> Tensor:
    if moment.values.is_cuda and has_triton():
        from zoo.nn.adamw.kernel import in_bf16

        return in_bf16(moment, start, end)
    values = torch.empty(end - start, dtype=torch.bfloat16, device=moment.values.device)
    for begin in range(start, end, CHUNK):  # its temporary values take many times its memory
        values[begin - start : begin - start + CHUNK] = moment.read(begin, min(begin + CHUNK, end))
    return values


def _not_updated(entry: ShardedTensor, replica: int, world: World) -> Iterator[Piece]:
    """The part of a tensor that this one of its data-parallel ranks writes."""
    tensor = entry.data
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter or tensor.nbytes < _DIVIDED or not tensor.is_contiguous():
        if replica == 0:
            yield from whole(boxes(entry), tensor.detach(), steady=is_parameter)
        return
    is_expert = not getattr(tensor, "allreduce", True)
    ranks = (world.groups.expt_dp if is_expert else world.groups.dp_cp).size()
    start, end = (tensor.numel() * share // ranks for share in (replica, replica + 1))
    yield from flat(boxes(entry), tuple(tensor.shape), tensor.detach().view(-1)[start:end], start)


def weights_wanted(modules: Sequence[MegatronModule], adapters: Adapters | None, world: World) -> list[Piece]:
    """All tensors of this rank's model chunks, or of the adapters."""
    entries = _tensors(modules, adapters, world)
    return [piece for entry in entries for piece in whole(boxes(entry), entry.data.detach())]


def cut_of_parameters(modules: Sequence[MegatronModule], world: World) -> dict[Tensor, list[Box]]:
    """How a checkpoint cuts each tensor of this rank's model chunks."""
    return {entry.data: boxes(entry) for entry in _tensors(modules, None, world)}


def load_objects(modules: Sequence[MegatronModule], index: Index, world: World) -> None:
    """Load what this rank's modules keep next to tensors, as far as the checkpoint has it."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    for module, name, entry in _described(modules, None, world):
        if isinstance(entry, ShardedObject) and entry.data is not None:
            value = index.object(entry.unique_key)
            if value is not None and module is not None:
                module.load_state_dict({name: value}, strict=False)


def load_optimizer(trainable: Trainable, world: World, index: Index, step: int) -> None:
    """Fill the optimizer's state of this rank's ranges, in the formats that this run has; the weights are loaded by now.

    Masters come from what completes bf16 weights or from fp32 values, whichever the checkpoint has. Parameters that were
    frozen when it was written have neither: their masters are the weights, their moments begin at zero. So do both moments of
    one that had no second moment: the first alone would make updates far too large.

    Args:
        step: how many updates the state has seen.
    """
    for each in trainable.optimizers:
        each.optimizer.allocate()
        each.optimizer.updates = step
    pieces: list[Piece] = []
    actions: list[Callable[[], object]] = []

    def read() -> None:
        fill(pieces, index, direct=True)
        for action in actions:
            action()
        pieces.clear()
        actions.clear()

    for more, action in _state_wanted(trainable, world, index.tensors):
        pieces += more
        actions += [action] if action else []
        if actions and sum(piece.nbytes for piece in pieces) >= _READ_AT_ONCE:
            read()
    read()


def _state_wanted(trainable: Trainable, world: World, stored: Mapping[str, TensorStorageMetadata]) -> Iterator[Wanted]:
    """This rank's state, as far as a checkpoint has it `stored`; moments that it has not are zeros."""
    ranges = _ranges(trainable)
    for entry in _tensors(trainable.modules, trainable.adapters, world):
        if (held_range := ranges.get(entry.data)) is None:
            continue
        cut, shape = boxes(entry), tuple(entry.data.shape)

        def pieces(
            name: str,
            target: Tensor,
            cut: list[Box] = cut,
            shape: tuple[int, ...] = shape,
            start: int = held_range.start,
        ) -> list[Piece]:
            wanted = list(flat(cut, shape, target, start, name and f"{_STATE}.{name}."))
            return wanted if all(piece.key in stored for piece in wanted) else []

        optimizer, part = held_range.optimizer, held_range.part
        moments = {name: optimizer.moment(part, name) for name in optimizer.moment_names(part)}
        are_stored = all(pieces(name, moment.values) for name, moment in moments.items())
        for name, moment in moments.items():
            if not are_stored:
                moment.zero()
            elif moment.exponents is None:
                yield pieces(name, moment.values), None
            else:
                target = torch.zeros(moment.values.numel(), device=moment.values.device)
                yield pieces(name, target), partial(moment.write, target)
        yield _master_wanted(held_range, pieces, stored)


def _master_wanted(
    held_range: _Range, pieces: Callable[[str, Tensor], list[Piece]], stored: Mapping[str, TensorStorageMetadata]
) -> Wanted:
    part = held_range.part.detach()
    is_half = part.dtype == torch.bfloat16
    rest = held_range.optimizer.state[held_range.part][MASTER] if is_half else torch.zeros_like(part, dtype=torch.int16)
    if wanted := pieces(_REST, rest):  # bits that fp32 weights lack of those of a bf16 run are added
        return wanted, None if is_half else lambda: part.copy_(join(part.bfloat16(), rest))
    if not is_half:
        return [], None
    if all(stored[piece.key].properties.dtype == part.dtype for piece in pieces("", part)):
        rest.zero_()  # all that it has of them are bf16 weights, which are loaded by now
        return [], None
    target = torch.zeros_like(part, dtype=torch.float32)  # padding is in no checkpoint
    return pieces("", target), partial(held_range.optimizer.set_scaled_state, held_range.part, MASTER, target)


def _ranges(trainable: Trainable) -> dict[Tensor, _Range]:
    """This rank's range of each parameter that it updates."""
    return {
        held.parameter: _Range(held.start, each.optimizer, held.part)
        for each in trainable.optimizers
        for held in held_ranges(each)
        if each.optimizer.updates_here(held.part)
    }


def key_of(rank: int, ranks: int) -> str:
    """The key of a rank's random state in a checkpoint that `ranks` ranks have written."""
    return f"random/shard_{rank}_{ranks}"


def random_state() -> JsonObject:
    """The states of the random generators of Python, NumPy, torch, the GPU and megatron-core."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numpy = np.random.get_state(legacy=True)
    assert isinstance(numpy, tuple)
    return {
        "python": random.getstate(),
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def load_random_state(index: Index, world: World) -> None:
    """Resume from the state that `random_state` gave on this rank, where a checkpoint of as many ranks has it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = index.object(key_of(world.rank, world.size))
    if state is None:
        return
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))


def packed(value: object) -> bytes:
    """An object as torch.save writes it; read back with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
