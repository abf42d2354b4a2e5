"""A copy of what this rank writes of a step, taken between two steps: the only part of a save that training waits for.

Nothing is exchanged and nothing gathered: each rank copies its own pieces. On a GPU the copy of weights and optimizer
state runs beside the next step, whose update waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zoo.checkpoint.sharded_state import Trainable, packed, to_write
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.storage.pieces import Piece
from zoo.parallel.world import World

_OPTIMIZER = "optimizer."  # prefix of the keys of its state


@dataclass(frozen=True)
class Snapshot:
    """The state of a step, as this rank holds it."""

    copied: CpuCopy
    rank: int
    size: int


def random_key(rank: int, ranks: int) -> str:
    """Under which a checkpoint of so many ranks has a rank's random state."""
    return f"random/shard_{rank}_{ranks}"


def take(trainable: Trainable, world: World, copied: CpuCopy, *, optimizer: bool = True) -> Snapshot:
    """Copy everything, or all but the `optimizer`'s state; on a GPU, begin to."""
    held = to_write(trainable, world, optimizer=optimizer)
    held.objects[random_key(world.rank, world.size)] = packed(random_state())
    copied.take(ordered(held.pieces), held.objects)
    return Snapshot(copied, world.rank, world.size)


def prepare(trainable: Trainable, world: World, copied: CpuCopy, *, optimizer: bool = True) -> int:
    """Take the host memory for `take` beside the steps; optimizer state must be there. Returns its bytes."""
    held = to_write(trainable, world, optimizer=optimizer)
    held.objects[random_key(world.rank, world.size)] = packed(random_state())
    return copied.prepare(held.pieces, held.objects)


def ordered(pieces: Sequence[Piece]) -> list[Piece]:
    """Weights first: ranks that need them alone, or those of another rank, read no optimizer state."""
    return sorted(pieces, key=lambda piece: piece.key.startswith(_OPTIMIZER))


def random_state() -> dict[str, Any]:
    """The states of the random generators of Python, NumPy, torch, the GPU and megatron-core."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numpy: Any = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a state that `random_state` gave."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))
