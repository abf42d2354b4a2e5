"""Private names of megatron-core that other rooms need, behind public names of zoo's.

megatron-core may change a name that begins with an underscore in any release. So no other room reads one, and
tests/unit/parallel/megatron/test_private.py compares their signatures with those that zoo was written for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zoo.parallel.megatron.replaced import replaced


@contextmanager
def without_a_random_state() -> Iterator[None]:
    """Leave the GPU's random state alone inside the block, where megatron-core would read and set it."""
    from megatron.core.tensor_parallel import random

    def nothing(*args: Any, **options: Any) -> None:
        return None

    with replaced(random, _get_cuda_rng_state=nothing, _set_cuda_rng_state=nothing):
        yield
