"""A model's weights out to a Hugging Face folder: at the end of a run, or of one of its checkpoints later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zoo.bridge import ShardInfo, TorchComm, export_hf
from zoo.bridge.native import check_sums
from zoo.config.compose import load_recipe, recipe_for_weights
from zoo.config.locate import Place, read_arch, step_of
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.engine.checkpoint import initial_weights, model_card, sharded
from zoo.engine.checkpoint.selection import is_reward_model
from zoo.engine.distributed.world import World, world
from zoo.engine.model import build
from zoo.engine.model.meta_model import family_of
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
        source = sharded.started_from(source)
    if source is not None and source.kind == "zoo":
        check_sums(source.folder, TorchComm.from_groups(here.groups))  # what is carried comes from there
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
        ends=[assembly.processor.end_id],
        **options,
    )


def export_run(run: Place, target: Path, **options: Any) -> Path:
    """A run's checkpoint (adapters merged) as a Hugging Face folder, by this process alone; `options`: of `export_hf`."""
    mtp = f"train.mtp_loss={sharded.read_origin(run)['mtp_loss']}"
    family = family_of(read_arch(run.files)).name
    loss = ["train.loss=reward"] if is_reward_model(run) else []
    recipe = recipe_for_weights(str(run.folder), family, [mtp, "engine.precision=fp32", *loss])
    with world(recipe) as here:
        recipe = validate(recipe, here.size)
        assembly = build.assemble(recipe, run)
        chunks = build.build_model(assembly, recipe, here)
        adapters = initial_weights.load_run(chunks, run, assembly, recipe, here)
        if adapters is not None:
            adapters.freeze_others()
        about = partial(model_card.trained, _recipe_of(run), step_of(run.folder), sharded.started_from(run))
        return export(chunks, target, assembly, here, run, card=about, **options)


def _recipe_of(run: Place) -> Recipe | None:
    """The recipe that a checkpoint was trained by; None for one of another zoo, whose keys are not known here."""
    try:
        return load_recipe(run.folder / "config.yaml")
    except UserError:
        return None
