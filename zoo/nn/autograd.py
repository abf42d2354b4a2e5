"""The type of the context that PyTorch hands to an autograd Function, for annotations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """What a forward pass keeps for its backward pass: tensors by `save_for_backward`, everything else as attributes."""

    saved_tensors: tuple[Any, ...]  # Tensor or None, in the order in which they were saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
