"""The same figures from the same seed: what has to be said to torch, cuBLAS, NCCL and Transformer Engine for it.

Without a GPU it is always said, as it costs next to nothing there. With one, `run.deterministic` asks for it: kernels
whose sums have no fixed order are then replaced by others, or refused by torch as soon as one is called.
"""

from __future__ import annotations

import os
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
