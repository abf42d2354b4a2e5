"""Importing megatron-core without torch.compile.

megatron-core decorates some thirty functions with torch.compile as it is imported, which imports TorchDynamo and
TorchInductor: a third of the CPU seconds of a start. zoo calls few of these functions, and on the CPU none.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def import_core() -> None:
    """Import megatron.core; what it gives to torch.compile is compiled at its first call. To be called before any import of it."""
    if "megatron.core" in sys.modules:
        return
    import torch

    module: Any = torch
    compile_now, module.compile = torch.compile, _at_first_call(torch.compile)
    try:
        importlib.import_module("megatron.core")
    finally:
        module.compile = compile_now


def _at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, as a decorator too, that waits until the function is called."""

    def later(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        if function is None:
            return functools.partial(later, **options)
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(compile_now(function, **options))
            return compiled[0](*args, **kwargs)

        return call

    return later
