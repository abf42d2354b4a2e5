"""Attributes of others' modules and classes that have another value for a block; megatron-core's private ones are named here alone.

megatron-core may change a name that begins with an underscore in any release. tests/unit/parallel/megatron/test_private.py compares
the signatures of those that zoo uses with those that it was written for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Give a module's or a class's attributes other values inside the block; AttributeError where it has no such attribute."""
    for name in values:
        getattr(owner, name)
    before = {name: vars(owner)[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def without_a_random_state() -> Iterator[None]:
    """Leave the GPU's random state alone inside the block, where megatron-core would read and set it."""
    from megatron.core.tensor_parallel import random

    def nothing(*args: object, **options: object) -> None:
        return None

    with replaced(random, _get_cuda_rng_state=nothing, _set_cuda_rng_state=nothing):
        yield
