"""The state of a rank's random generators, as plain values and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Of Python, NumPy, torch, the GPU and megatron-core's own generators."""
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
