"""The adapters of a run's checkpoint as a folder, in PEFT's format or in the one that vLLM loads."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from zoo.bridge.export_plan import Source
from zoo.bridge.mapping.served import AdapterFormat
from zoo.checkpoint import loading, lora_files
from zoo.checkpoint.export import adapters_of, opened
from zoo.config.compose import load_recipe
from zoo.config.locate import Place, read_origin, step_of
from zoo.errors import UserError
from zoo.model import build
from zoo.model.lora import Adapters
from zoo.model.merged_tensors import MergedTensors


def export_run_adapters(
    run: Place,
    target: Path,
    adapter_format: AdapterFormat,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write them, without the weights that they belong to in memory.

    Raises:
        UserError: the run has no adapters, or vLLM would not load some of what it has trained.
    """
    origin = read_origin(run.folder)
    if "lora" not in origin:
        raise UserError(f"adapter_format={adapter_format}: {run.folder} holds no adapters; leave it out")
    folder = str(run.folder.parent.parent)
    with opened(run) as (assembly, recipe, world):
        recipe = loading.with_adapters_of(recipe, origin)
        adapters, shapes, base = adapters_of(run, assembly, recipe, world)
        if adapters.not_served:
            why = f"vLLM and SGLang do not load {adapters.not_served}"
            if adapter_format == "vllm":
                raise UserError(
                    f"adapter_format=vllm: {why}; without this key zoo convert merges all of it into the weights"
                )
            print(f"zoo: {why}; without adapter_format zoo convert merges all of it into the weights", file=sys.stderr)
        assembly = replace(assembly, source=base)
        _take_frozen(adapters, assembly, shapes)
        recipe = replace(recipe, model=replace(recipe.model, init=origin["init"]))
        with suppress(UserError):  # by another zoo, whose keys are not known here
            recipe = load_recipe(run.folder / "config.yaml")
        recipe = replace(recipe, run=replace(recipe.run, dir=folder))
        steps = step_of(run.folder)
        return lora_files.export_adapters(
            adapters, target, assembly, recipe, world, steps, adapter_format=adapter_format, dtype=dtype, overwrite=overwrite
        )  # fmt: skip


def _take_frozen(adapters: Adapters, assembly: build.Assembly, shapes: dict[str, tuple[int, ...]]) -> None:
    """Read what PEFT's modules_to_save hold beside trained weights."""
    frozen = {
        saved.zoo: parameter for saved, parameter in adapters.whole.saved if saved.zoo not in adapters.whole.trained
    }
    if frozen:
        names = sorted(shapes.keys() - {"score.weight"})
        source = Source.open(assembly.source, assembly.family.load("bridge"), names, adapters.dims)
        assert source is not None
        tensors = MergedTensors(source, {name: shapes[name] for name in names}, {}, {})
        for name, parameter in frozen.items():
            parameter.data = tensors.read(name).to(parameter.dtype)
