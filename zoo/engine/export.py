"""A model's weights out to a Hugging Face folder: at the end of a run, or of one of its checkpoints later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.bridge import ShardInfo, TorchComm, export_hf
from zoo.config.compose import recipe_for_weights
from zoo.config.locate import STATE, Place, locate
from zoo.config.validate import validate
from zoo.engine import build, checkpoint
from zoo.engine.world import World, world
from zoo.errors import UserError


def export(
    chunks: Sequence[Any],
    target: Path,
    assembly: build.Assembly,
    here: World,
    source: Place | None,
    **options: Any,
) -> Path:
    """Write this rank's share of the folder; `source` and `options` are those of `zoo.bridge.export_hf`.

    Of a source that is a run's checkpoint, what that run started from is the source: its own tensors are all trained.
    """
    while source is not None and source.kind == "run":
        source = started_from(source)
    return export_hf(
        chunks,
        target,
        assembly.family.load("bridge"),
        build.model_dims(assembly),
        ShardInfo.from_groups(here.groups),
        TorchComm.from_groups(here.groups),
        config=assembly.config.hf,
        source=source,
        processor=assembly.processor.hf,
        **options,
    )


def started_from(run: Place) -> Place | None:
    """Where the weights of a run's checkpoint come from; None for random ones."""
    init = read_origin(run)["init"]
    return None if init == "random" else locate(init, key=f"{run.folder / STATE}: init")


def read_origin(run: Place) -> dict[str, Any]:
    """`zoo.engine.checkpoint.origin` of a run's checkpoint."""
    weights = _state(run).get("weights")
    if weights is None:
        raise UserError(
            f"{run.folder}: its {STATE} is of an earlier zoo, which exported at the end of a run alone"
        )
    return weights


def _state(run: Place) -> dict[str, Any]:
    return json.loads((run.folder / STATE).read_text(encoding="utf-8"))


def export_run(run: Place, target: Path, **options: Any) -> Path:
    """A run's checkpoint as a Hugging Face folder, by this process alone; `options` are those of `export_hf`."""
    mtp = f"train.mtp_loss={read_origin(run)['mtp_loss']}"
    recipe = recipe_for_weights(
        str(run.folder), _state(run)["model"]["family"], [mtp, "engine.precision=fp32"]
    )
    with world(recipe) as here:
        recipe = validate(recipe, here.size)
        assembly = build.assemble(recipe)
        chunks = build.build_model(assembly, recipe, here)
        checkpoint.load_weights(chunks, run.folder, here)
        return export(chunks, target, assembly, here, run, **options)
