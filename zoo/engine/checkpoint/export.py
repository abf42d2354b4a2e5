"""A model's weights out to a Hugging Face folder: at the end of a run, or of one of its checkpoints later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zoo.bridge import ShardInfo, TorchComm, export_hf
from zoo.bridge.export import export_tensors
from zoo.bridge.export_plan import Source
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
from zoo.engine.model import build, lora
from zoo.engine.model.merged_tensors import MergedTensors
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

    Tensors go from file to file, a few at a time. Those of earlier zoos' checkpoints, and of reward models with adapters, go
    through a model in memory.
    """
    origin = sharded.read_origin(run)
    family = family_of(read_arch(run.files)).name
    loss = ["train.loss=reward"] if is_reward_model(run) else []
    keys = [f"train.mtp_loss={origin['mtp_loss']}", "engine.precision=fp32", *loss]
    recipe = recipe_for_weights(str(run.folder), family, keys)
    about = partial(model_card.trained, _recipe_of(run), step_of(run.folder), sharded.started_from(run))
    with world(recipe) as here:
        recipe = validate(recipe, here.size)
        assembly = build.assemble(recipe, run)
        more = {
            "card": about,
            **options,
            "progress": None if quiet else partial(Progress, f"writing {target.name}"),
        }
        if "lora" not in origin and isinstance(index := sharded.open_weights(run.folder), Index):
            return _stream(index, run, target, assembly, recipe, here, **more)
        if "lora" in origin and not loss:
            settings = {
                **origin["lora"],
                "base_dtype": "model",
            }  # adapters are added to the weights as they are
            return _stream_merged(run, target, assembly, recipe.replace({"lora": settings}), here, **more)
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
            source=source,
            **_beside(assembly),
            **options,
        )


def _stream_merged(
    run: Place, target: Path, assembly: build.Assembly, recipe: Recipe, here: World, **options: Any
) -> Path:
    """A checkpoint of adapters, merged into what they belong to; what no adapter belongs to keeps its bytes."""
    base, bridge, dims = sharded.started_from(run), assembly.family.load("bridge"), build.model_dims(assembly)
    assert base is not None
    with on_meta(here) as nowhere:
        chunks = build.build_model(assembly, recipe, nowhere)
    lora.without_memory(chunks)
    shapes = {name: tuple(one.shape) for name, one in model_parameters(chunks)}
    adapters = lora.place(chunks, assembly.family, dims, read_arch(base.files), recipe, here)
    sharded.load_adapters(adapters, run.folder, here)
    added = {one.target.zoo: one.adapter for one in adapters.held}
    source = Source.open(base, bridge, sorted(shapes), dims)
    assert source is not None
    return export_tensors(
        MergedTensors(source, shapes, added),
        shapes,
        target,
        bridge,
        dims,
        frozen=sorted(shapes.keys() - added.keys()),
        source=base,
        **_beside(assembly),
        **options,
    )


def _beside(assembly: build.Assembly) -> dict[str, Any]:
    """What an export writes beside the weights."""
    processor = assembly.processor
    return {"config": assembly.config.hf, "processor": processor.hf, "ends": [processor.end_id]}


def _recipe_of(run: Place) -> Recipe | None:
    """The recipe that a checkpoint was trained by; None for one of another zoo, whose keys are not known here."""
    try:
        return load_recipe(run.folder / "config.yaml")
    except UserError:
        return None
