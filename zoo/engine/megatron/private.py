"""Private names of megatron-core that other rooms need, behind public names of zoo's.

megatron-core may change a name that begins with an underscore in any release. So no other room reads one, and
tests/unit/engine/megatron/test_private.py compares their signatures with those that zoo was written for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def range_in_bucket(optimizer: Any, parameter: Any) -> Any:
    """This rank's part of a parameter, as a range (start, end) of elements of the parameter's gradient bucket."""
    return optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]


def weight_and_moments(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """This rank's part of a parameter's fp32 weight ("param") and of its optimizer state, by name."""
    tensors: dict[str, Any] = optimizer._get_main_param_and_optimizer_states(parameter)
    return tensors


def allocate_moments(optimizer: Any) -> None:
    """Take a step of torch's AdamW on gradients of zero, so that every parameter has moments."""
    optimizer._init_optimizer_states_with_dummy_values()


@contextmanager
def without_a_random_state() -> Iterator[None]:
    """Leave the GPU's random state alone inside the block, where megatron-core would read and set it."""
    from megatron.core.tensor_parallel import random

    with (
        patch.object(random, "_get_cuda_rng_state", lambda *args, **options: None),
        patch.object(random, "_set_cuda_rng_state", lambda *args, **options: None),
    ):
        yield
