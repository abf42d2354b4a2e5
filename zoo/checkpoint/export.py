"""A model's weights out to a Hugging Face folder: at the end of a run, or of one of its checkpoints later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.bridge import SafetensorsFolder, ShardInfo, TorchComm, export_hf, fp8
from zoo.bridge.export import HeldTensors, export_tensors
from zoo.bridge.export_plan import Source
from zoo.bridge.exported import ExportedTensors
from zoo.bridge.files.record import verify_checksums
from zoo.bridge.load import pass_over
from zoo.bridge.parallel import model_parameters
from zoo.bridge.progress import Progress
from zoo.checkpoint import initial_weights, loading, model_card
from zoo.checkpoint.selection import is_reward_model
from zoo.checkpoint.sharded_state import cut_of_parameters
from zoo.checkpoint.storage.index import Index
from zoo.checkpoint.storage.reading import WholeTensors
from zoo.config.compose import load_recipe, recipe_for_weights
from zoo.config.locate import Place, read_arch, read_origin, step_of, unquantised
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError
from zoo.model import build, lora
from zoo.model.merged_tensors import MergedTensors
from zoo.model.meta_model import build_meta_model, family_of, on_meta
from zoo.model.run_settings import settings_of
from zoo.parallel.world import World, open_world

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def export(
    chunks: Sequence[MegatronModule],
    target: Path,
    assembly: build.Assembly,
    world: World,
    source: Place | None,
    **options: Any,
) -> Path:
    """Write this rank's share of the folder; `source` and `options` are those of `zoo.bridge.export_hf`.

    Where the source is a run's checkpoint, tensors that are not trained are copied from the weights that the run started from.
    Parameters that are frozen now are written from the model: that run may have trained them.
    """
    source_has_frozen = source is None or source.kind != "run"
    source = _beginning(source, world)
    bridge, dims, ends = assembly.family.load("bridge"), build.model_dims(assembly), [*assembly.processor.ends.values()]
    return export_hf(
        chunks, target, bridge, dims, ShardInfo.from_groups(world.groups), TorchComm.from_groups(world.groups),
        config=assembly.config.hf, source=source, source_has_frozen=source_has_frozen, processor=assembly.served,
        ends=ends, **options,
    )  # fmt: skip


def _beginning(source: Place | None, world: World) -> Place | None:
    """Where tensors that pass through come from: of a run's checkpoint, what that run started from."""
    while source is not None and source.kind == "run":
        source = loading.started_from(source)
    if source is not None and source.kind == "zoo":
        verify_checksums(source.folder, TorchComm.from_groups(world.groups))
    return source


def export_run(run: Place, target: Path, *, quiet: bool = False, **options: Any) -> Path:
    """A run's checkpoint (adapters merged) as a Hugging Face folder, by this process alone; `options`: of `export_hf`.

    Tensors go from file to file, a few at a time. Those of reward models with adapters go through a model in memory.
    """
    with opened(run) as (assembly, recipe, world):
        trained = None  # by a recipe of another zoo, whose keys are not known here
        with suppress(UserError):
            trained = load_recipe(run.folder / "config.yaml")
        started = step_of(run.folder), loading.started_from(run)
        kind = fp8.KIND if options.get("dtype") == fp8.DTYPE else ""
        about = partial(model_card.trained, trained, *started, ends=assembly.processor.ends, quantised=kind)
        with _held(run, assembly, recipe, world) as held:
            if held is not None:
                progress = None if quiet else partial(Progress, f"writing {target.name}")
                ends = list(assembly.processor.ends.values())
                files = {"processor": assembly.served, "ends": ends, "card": about}
                return export_tensors(held, target, **{**files, **options}, progress=progress)
        if options.get("dtype") == fp8.DTYPE:
            raise UserError(
                f"dtype=fp8: {run.folder} holds a reward model's adapters; convert it to a Hugging Face folder first, and that to FP8"
            )
        chunks = build.build_model(assembly, recipe, world)
        adapters = initial_weights.load_run(chunks, run, assembly, recipe, world)
        if adapters is not None:
            adapters.freeze_others()
        return export(chunks, target, assembly, world, loading.started_from(run), card=about, **options)


def export_folder(origin: Place, target: Path, *, quiet: bool = False, **options: Any) -> Path:
    """A Hugging Face folder as one of another `dtype` or with other shards; `options`: of `export_hf`. Tensors go from file to file."""
    arch = unquantised(read_arch(origin.files))
    with SafetensorsFolder(origin.weights) as reader:
        model = build_meta_model(arch, reader.names())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.parameters.items()}
    source = Source.open(origin, model.bridge, sorted(shapes), model.dims)
    assert source is not None
    with source.reader:
        pass_over(source.resolution, source.reader)
        held = HeldTensors(
            MergedTensors(source, shapes, {}, {}), shapes, model.bridge, model.dims, arch, origin, frozen=sorted(shapes)
        )
        about = partial(model_card.converted, origin, how={"quantised": fp8.KIND})
        progress = None if quiet else partial(Progress, f"writing {target.name}")
        return export_tensors(held, target, card=about, **options, progress=progress)


@contextmanager
def exported_tensors(run: Place) -> Iterator[ExportedTensors | None]:
    """What `export_run` would write, to be read tensor by tensor; None where it goes through a model in memory."""
    with ExitStack() as readers:
        with opened(run) as (assembly, recipe, world):
            held = readers.enter_context(_held(run, assembly, recipe, world))
            tensors = None if held is None else readers.enter_context(ExportedTensors(held))
        yield tensors


@contextmanager
def opened(run: Place) -> Iterator[tuple[build.Assembly, Recipe, World]]:
    """A run's checkpoint for an export: its model before any weight, and a world of this process."""
    origin = read_origin(run.folder)
    family = family_of(read_arch(run.files)).name
    loss = ["train.loss=reward"] if is_reward_model(run) else []
    keys = [f"train.mtp_loss={origin['mtp_loss']}", "engine.precision=fp32", *loss]
    if speech := origin.get("speech_loss"):
        keys += [f"train.speech_loss={speech}", f"model.freeze=[{','.join(origin.get('freeze', ()))}]"]
    settings = settings_of(run)
    recipe = recipe_for_weights(str(run.folder), family, keys, settings.layer)
    with open_world(recipe) as world:
        recipe = validate(recipe, world.size)
        yield replace(build.assemble(recipe, run), settings=settings), recipe, world


@contextmanager
def _held(run: Place, assembly: build.Assembly, recipe: Recipe, world: World) -> Iterator[HeldTensors | None]:
    """A run's tensors, read from its files; None of reward models with adapters."""
    origin = read_origin(run.folder)
    if "lora" not in origin:
        with _whole(loading.open_weights(run.folder), run, assembly, recipe, world) as held:
            yield held
    elif not is_reward_model(run):
        yield _merged(run, assembly, loading.with_adapters_of(recipe, origin), world)
    else:
        yield None


@contextmanager
def _whole(index: Index, run: Place, assembly: build.Assembly, recipe: Recipe, world: World) -> Iterator[HeldTensors]:
    """Those of a checkpoint without adapters."""
    with on_meta(world) as nowhere:
        chunks = build.build_model(assembly, recipe, nowhere)
        cut = cut_of_parameters(chunks, nowhere)
        boxes = {name: (tuple(parameter.shape), cut[parameter]) for name, parameter in model_parameters(chunks)}
    source = _beginning(run, world)
    shapes = {name: shape for name, (shape, _) in boxes.items()}
    bridge, dims = assembly.family.load("bridge"), build.model_dims(assembly)
    with WholeTensors(index, boxes) as reader:
        yield HeldTensors(reader, shapes, bridge, dims, assembly.config.hf, source, reader.expect)


def _merged(run: Place, assembly: build.Assembly, recipe: Recipe, world: World) -> HeldTensors:
    """Those of a checkpoint of adapters, merged into what they belong to; what no adapter belongs to keeps its bytes."""
    adapters, shapes, base = adapters_of(run, assembly, recipe, world)
    bridge, dims = assembly.family.load("bridge"), build.model_dims(assembly)
    added, whole = {parameter.target.zoo: parameter.adapter for parameter in adapters.held}, adapters.whole.trained
    source = Source.open(base, bridge, sorted(shapes), dims)
    assert source is not None
    merged, frozen = MergedTensors(source, shapes, added, whole), sorted(shapes.keys() - added.keys() - whole.keys())
    return HeldTensors(merged, shapes, bridge, dims, assembly.config.hf, base, frozen=frozen)


def adapters_of(
    run: Place, assembly: build.Assembly, recipe: Recipe, world: World
) -> tuple[lora.Adapters, dict[str, tuple[int, ...]], Place]:
    """A checkpoint's adapters without what they belong to, the shapes of the model's parameters, and where those weights lie."""
    base = loading.started_from(run)
    assert base is not None
    with on_meta(world) as nowhere:
        chunks = build.build_model(assembly, recipe, nowhere)
    lora.without_memory(chunks)
    shapes = {name: tuple(parameter.shape) for name, parameter in model_parameters(chunks)}
    dims, arch = build.model_dims(assembly), read_arch(base.files)
    adapters = lora.attach_zeros(chunks, assembly.family, dims, arch, recipe, world)
    adapters.whole.allocate()
    loading.load_adapters(adapters, run.folder, world)
    return adapters, shapes, base
