"""The same figures from the same seed: what has to be said to torch, cuBLAS, NCCL and Transformer Engine for it.

Without a GPU it is always said, as it costs next to nothing there. With one, `run.deterministic` asks for it: kernels
whose sums have no fixed order are then replaced by others, or refused by torch as soon as one is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """Before anything is put on a device."""
    wanted = on_cpu or recipe.run.deterministic
    if wanted and not on_cpu:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(wanted)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # nothing of zoo's reads it
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = False


def refusal(error: RuntimeError) -> UserError | None:
    """What torch says of an operation without a fixed order, as a sentence; None where it says something else."""
    said = str(error)
    if _REFUSED not in said:
        return None
    return UserError(
        f"run.deterministic=true: {said.partition(_REFUSED)[0].strip()} has no deterministic form on this device; leave "
        "run.deterministic out, or use engine.backend=torch"
    )


# Where PyTorch may be asked to round fp32 values to TF32 (10 bits) or bf16 in a product, by the user or by a library.
_ROUNDED = (
    "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn",
)  # fmt: skip


@contextmanager
def plain_fp32() -> Iterator[None]:
    """Products and convolutions of fp32 values are in fp32 meanwhile, whatever was asked for before; after it, that again."""
    places = [_place(name) for name in ("", *_ROUNDED)]
    before = [place.fp32_precision for place in places]
    old = [_asked_of(read) for read in _OLD]
    try:
        _settle(["highest", False, False], ["ieee"] * len(places), places)
        yield
    finally:
        _settle(old, before, places)


_OLD = (
    torch.get_float32_matmul_precision,
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
)


def _asked_of(read: Any) -> Any:
    """What an older setting says; None where PyTorch refuses to say it beside a newer one."""
    try:
        return read()
    except RuntimeError:
        return None


def _settle(old: list[Any], new: list[str], places: list[Any]) -> None:
    """The older settings first: each of them sets newer ones, too, and they must agree."""
    matmul, products, convolutions = old
    if products is not None:
        torch.backends.cuda.matmul.allow_tf32 = products
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    if matmul is not None:  # behind `allow_tf32`, which knows two of its three values
        torch.set_float32_matmul_precision(matmul)
    for place, precision in zip(places, new, strict=True):
        place.fp32_precision = precision


def _place(name: str) -> Any:
    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found
