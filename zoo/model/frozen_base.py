"""The frozen matrices of the decoder's layers, held in `lora.base_dtype` from when they are loaded on.

Those of a Hugging Face folder are quantised one by one as they are read (`hold_as_loaded`), so no rank ever has all of them dense. Random
weights, those of a run and those that are written to `base/` first are quantised when all are there (`hold_loaded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.nn.modules.module import register_module_parameter_registration_hook

from zoo.config.locate import Place, quantisation, read_arch
from zoo.config.schema import Recipe
from zoo.model.lora import linears_of
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.nn.decoder.frozen.modules import freeze, without_memory
from zoo.registry import ModelFamily

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

_KINDS = (ColumnParallelLinear, RowParallelLinear, GroupedExperts)  # of modules that a decoder's matrices are in


def is_quantised_as_loaded(recipe: Recipe, source: Place | None) -> bool:
    """Whether a run with adapters reads the weights that they belong to from the folder itself, not by way of `base/`."""
    if recipe.lora.base_dtype == "model" or recipe.lora.merge_first or source is None or source.kind != "hf":
        return False
    return not quantisation(read_arch(source.files))


@contextmanager
def without_matrices() -> Iterator[None]:
    """Modules that are built inside have no memory for what `hold_as_loaded` may hold."""

    def shrink(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if not isinstance(module, _KINDS) or parameter.ndim < 2:
            return None
        return torch.nn.Parameter(without_memory(parameter), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(shrink)  # type: ignore[arg-type]  # its hint lacks the result
    try:
        yield
    finally:
        hook.remove()


def hold_as_loaded(chunks: Sequence[MegatronModule], recipe: Recipe, family: ModelFamily) -> None:
    """Make room for codes in chunks that were built `without_matrices`, and give their other parameters memory."""

    def is_frozen(name: str, parameter: torch.nn.Parameter) -> bool:
        return family.part_of(name, recipe.named_parts) not in recipe.lora.whole_parts

    _hold(chunks, recipe, is_frozen, empty=True)
    for chunk in chunks:
        for module in chunk.modules():
            for parameter in module.parameters(recurse=False) if isinstance(module, _KINDS) else ():
                if parameter.ndim > 1 and not hasattr(parameter, "held"):
                    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def hold_loaded(chunks: Sequence[MegatronModule], recipe: Recipe) -> None:
    """Quantise what is loaded, once adapters are attached and all else is frozen; what is held already stays as it is."""
    _hold(chunks, recipe, lambda name, parameter: not (parameter.requires_grad or hasattr(parameter, "held")))


def _hold(
    chunks: Sequence[MegatronModule],
    recipe: Recipe,
    which: Callable[[str, torch.nn.Parameter], bool],
    empty: bool = False,
) -> None:
    if recipe.lora.base_dtype == "model":
        return
    names: dict[torch.nn.Module, list[str]] = {}
    for name, (module, parameter) in linears_of(chunks, recipe).items():
        if name.startswith("decoder.layers.") and which(name, parameter):
            names.setdefault(module, []).append(name.rpartition(".")[2])
    for module, of_module in names.items():
        freeze(module, of_module, recipe.lora.base_dtype, empty=empty)
