"""Which parameters a checkpoint has in fp32 among narrower ones: those that a model in half precision holds in fp32."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.bridge.mapping.rules import compile_pattern
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.native import PASS_THROUGH

Patterns = tuple[str, ...]  # zoo's names, or patterns of them


def stored_in_fp32(bridge: Bridge, weights: Path, *, native: bool, tied: bool) -> Patterns:
    """The parameters that a folder's headers say; of a folder that is in fp32 as a whole, those of the family (`Bridge.fp32`).

    Args:
        weights: folder of the safetensors.
        native: they have zoo's names.
        tied: the head is the embedding.
    """
    with SafetensorsFolder(weights) as reader:
        names = (
            {name: [name] for name in reader.names() if not name.startswith(PASS_THROUGH)}
            if native
            else bridge.zoo_names(reader.names())
        )
        dtypes = {name: reader.dtype(name) for name in names}
    if all(_is_wide(dtype) for dtype in dtypes.values()):
        return bridge.fp32
    wide = {zoo for name, several in names.items() if _is_wide(dtypes[name]) for zoo in several}
    for rule in bridge.rules:
        if tied and rule.tied_to and bridge.zoo_name(rule.tied_to) in wide:
            wide.add(rule.zoo)
    return tuple(sorted(wide))


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= torch.float32.itemsize


def among(patterns: Patterns, names: Iterable[str]) -> set[str]:
    """The names that one of the patterns fits."""
    regexes = [compile_pattern(pattern) for pattern in patterns if "{" in pattern]
    return {name for name in names if name in patterns or any(regex.fullmatch(name) for regex in regexes)}
