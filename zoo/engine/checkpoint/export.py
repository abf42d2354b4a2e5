"""A model's weights out to a Hugging Face folder: at the end of a run, or of one of its checkpoints later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zoo.bridge import ShardInfo, TorchComm, export_hf
from zoo.bridge.export import export_tensors
from zoo.bridge.native import check_sums
from zoo.bridge.parallel import model_parameters
from zoo.bridge.progress import Progress
from zoo.config.compose import load_recipe, recipe_for_weights
from zoo.config.locate import Place, read_arch, step_of
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.engine.checkpoint import initial_weights, model_card, sharded
from zoo.engine.checkpoint.contents import cut_of_parameters
from zoo.engine.checkpoint.selection import is_reward_model
from zoo.engine.checkpoint.storage.index import Index
from zoo.engine.checkpoint.storage.whole_tensors import WholeTensors
from zoo.engine.distributed.world import World, world
from zoo.engine.model import build
from zoo.engine.model.meta_model import family_of, on_meta
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
    source = _beginning(source, here)
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


def _beginning(source: Place | None, here: World) -> Place | None:
    """Where what is carried comes from: of a run's checkpoint, what that run started from."""
    while source is not None and source.kind == "run":
        source = sharded.started_from(source)
    if source is not None and source.kind == "zoo":
        check_sums(source.folder, TorchComm.from_groups(here.groups))
    return source


def export_run(run: Place, target: Path, *, quiet: bool = False, **options: Any) -> Path:
    """A run's checkpoint (adapters merged) as a Hugging Face folder, by this process alone; `options`: of `export_hf`.

    Tensors go from file to file, a few at a time. Adapters are merged in a model in memory, and so are checkpoints of
    earlier zoos read.
    """
    origin = sharded.read_origin(run)
    family = family_of(read_arch(run.files)).name
    loss = ["train.loss=reward"] if is_reward_model(run) else []
    keys = [f"train.mtp_loss={origin['mtp_loss']}", "engine.precision=fp32", *loss]
    recipe = recipe_for_weights(str(run.folder), family, keys)
    about = partial(model_card.trained, _recipe_of(run), step_of(run.folder), sharded.started_from(run))
    index = sharded.open_weights(run.folder)
    with world(recipe) as here:
        recipe = validate(recipe, here.size)
        assembly = build.assemble(recipe, run)
        if "lora" not in origin and isinstance(index, Index):
            return _stream(index, run, target, assembly, recipe, here, quiet, card=about, **options)
        chunks = build.build_model(assembly, recipe, here)
        adapters = initial_weights.load_run(chunks, run, assembly, recipe, here)
        if adapters is not None:
            adapters.freeze_others()
        return export(chunks, target, assembly, here, run, card=about, **options)


def _stream(
    index: Index,
    run: Place,
    target: Path,
    assembly: build.Assembly,
    recipe: Recipe,
    here: World,
    quiet: bool,
    **options: Any,
) -> Path:
    """A checkpoint without adapters, without a model in memory."""
    with on_meta(here) as nowhere:
        chunks = build.build_model(assembly, recipe, nowhere)
        cut = cut_of_parameters(chunks, nowhere)
        boxes = {name: (tuple(one.shape), cut[one]) for name, one in model_parameters(chunks)}
    source = _beginning(run, here)
    with WholeTensors(index, boxes) as reader:
        return export_tensors(
            reader,
            {name: reader.shape(name) for name in boxes},
            target,
            assembly.family.load("bridge"),
            build.model_dims(assembly),
            expect=reader.expect,
            progress=None if quiet else partial(Progress, f"writing {target.name}"),
            config=assembly.config.hf,
            source=source,
            processor=assembly.processor.hf,
            ends=[assembly.processor.end_id],
            **options,
        )


def _recipe_of(run: Place) -> Recipe | None:
    """The recipe that a checkpoint was trained by; None for one of another zoo, whose keys are not known here."""
    try:
        return load_recipe(run.folder / "config.yaml")
    except UserError:
        return None
