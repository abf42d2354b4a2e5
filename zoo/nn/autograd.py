"""The context that PyTorch hands to an autograd Function, for annotations, and calls that run once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint


class Context(FunctionCtx):
    """What a forward pass keeps for its backward pass: tensors by `save_for_backward`, everything else as attributes."""

    saved_tensors: tuple[Any, ...]  # Tensor or None, in the order in which they were saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


def on_host() -> AbstractContextManager[None]:
    """Inside, what a call keeps for its backward pass is copied to host memory, pinned beside a GPU, and back when it is asked for.

    Copies go on the stream that computes: a layer's input of a gigabyte takes 20 ms each way, where the layers of rows so long take
    half a second. A stream of their own would save a few per cent of that, and hold two more inputs on the GPU.
    """
    context: AbstractContextManager[None] = torch.autograd.graph.save_on_cpu(pin_memory=True)
    return context


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call gives, which runs again in the backward pass if there is one.

    What comes in may need no gradient, as that of a frozen embedding with adapters behind it: megatron-core's own recompute would
    then give adapters none. Without anything trained nothing is kept.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    settings: dict[str, Any] = {"use_reentrant": False, "context_fn": _same_draws}
    return checkpoint(function, *args, **settings, **kwargs)


def _same_draws() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a call and of its repetition, for which megatron-core's random states are what they were; PyTorch sees to its own."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def repeated() -> Iterator[None]:
        later = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(later)

    return nullcontext(), repeated()
