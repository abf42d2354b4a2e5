"""The states of the random generators of a rank, as a checkpoint holds them."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from zoo.types import JsonMapping, JsonObject


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


def set_random_state(state: JsonMapping) -> None:
    """Resume from a state that `random_state` gave."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

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
