"""The same numbers from the same seed: the settings of torch, cuBLAS, NCCL and Transformer Engine that this takes.

Without a GPU the settings are always made, as they cost next to nothing there. With one, `run.deterministic` asks for them:
kernels whose sums have no fixed order are then replaced by others, or refused by torch when they are called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

from zoo.config.schema import Recipe
from zoo.errors import UserError

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch refuses cuBLAS without it
    "NCCL_ALGO": "Ring",  # trees and in-network sums are chosen by what is fast
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
_REFUSED = "does not have a deterministic implementation"


def install(recipe: Recipe, on_cpu: bool) -> None:
    """Make the settings; to be called before anything is put on a device."""
    wanted = on_cpu or recipe.run.deterministic
    if wanted and not on_cpu:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    set_deterministic(wanted)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # nothing of zoo's reads it
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = False


def set_deterministic(strict: bool, warn: bool = False) -> None:
    """torch.use_deterministic_algorithms for eager code: that one imports TorchInductor to tell it, two seconds of a start."""
    torch.set_deterministic_debug_mode(("warn" if warn else "error") if strict else "default")
    if inductor := sys.modules.get("torch._inductor.config"):
        setattr(inductor, "deterministic", strict)  # noqa: B010  # mypy does not know it


@contextmanager
def explain_refusals() -> Iterator[None]:
    """Raise a UserError where torch refuses an operation inside the block because its sums have no fixed order."""
    try:
        yield
    except RuntimeError as error:
        operation, refused, _ = str(error).partition(_REFUSED)
        if not refused:
            raise
        raise UserError(
            f"run.deterministic=true: {operation.strip()} has no deterministic form on this device; leave "
            "run.deterministic out, or use engine.backend=torch"
        ) from None


# Where PyTorch may be asked to round fp32 values to TF32 (10 bits) or bf16 in a product, by the user or by a library.
_ROUNDED = (
    "", ".cuda.matmul", ".cudnn", ".cudnn.conv", ".cudnn.rnn", ".mkldnn", ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn",
)  # fmt: skip


def fp32_settings() -> list[str]:
    """What PyTorch is asked for in each place where it may round fp32 values."""
    return [attrgetter(f"backends{name}.fp32_precision")(torch) for name in _ROUNDED]


@contextmanager
def plain_fp32() -> Iterator[None]:
    """Compute products and convolutions of fp32 values in fp32 inside the block; the caller's settings are back after it."""
    before = fp32_settings()
    older = (
        _unless_mixed(torch.get_float32_matmul_precision),
        _unless_mixed(lambda: torch.backends.cuda.matmul.allow_tf32),
        _unless_mixed(lambda: torch.backends.cudnn.allow_tf32),
    )
    try:
        _set("highest", False, False, ["ieee"] * len(_ROUNDED))
        yield
    finally:
        _set(*older, before)


def _unless_mixed[T](read: Callable[[], T]) -> T | None:
    """The value of an older setting; None where PyTorch refuses to read it beside a newer one."""
    try:
        return read()
    except RuntimeError:
        return None


def _set(matmul: str | None, products: bool | None, convolutions: bool | None, newer: list[str]) -> None:
    """The older settings first: each of them sets newer ones, too, and they must agree."""
    if products is not None:
        torch.backends.cuda.matmul.allow_tf32 = products
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    if matmul is not None:  # after `allow_tf32`, which knows two of its three values
        torch.set_float32_matmul_precision(matmul)
    for name, precision in zip(_ROUNDED, newer, strict=True):
        setattr(attrgetter(f"backends{name}")(torch), "fp32_precision", precision)  # noqa: B010  # mypy does not know it
