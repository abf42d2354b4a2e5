"""Attributes of modules of others that have another value for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Give a module's attributes other values inside the block; AttributeError where it has no such attribute."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
