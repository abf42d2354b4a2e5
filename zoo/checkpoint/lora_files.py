"""A run's adapters and the folders they come from and go to: what they belong to, an adapter to go on from, the export."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from zoo.bridge import ExportWriter, Planned, ShardWriter, TorchComm
from zoo.bridge.files.headers import read_header
from zoo.bridge.files.side_files import write_card
from zoo.bridge.files.writer import disk_errors
from zoo.bridge.mapping import peft
from zoo.bridge.mapping.peft import CONFIG, WEIGHTS, magnitude_names, magnitudes, tensor_names, to_peft
from zoo.bridge.mapping.peft_targets import PREFIX
from zoo.bridge.mapping.served import AdapterFormat, stored_as, to_vllm, vllm_config
from zoo.bridge.parallel import join, shard_axis, together
from zoo.checkpoint import initial_weights, loading, model_card
from zoo.checkpoint.export import export
from zoo.config.locate import BASE, is_hub_id, locate, quantisation, read_arch
from zoo.config.schema import LoraConfig, Recipe
from zoo.errors import UserError
from zoo.files import expanded, read_object
from zoo.model import build
from zoo.model.lora import AdaptedWeight, Adapters, find_targets, sizes_of
from zoo.model.whole_parts import WholeParts
from zoo.parallel.object_group import agreed
from zoo.parallel.world import World
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def adapt(
    chunks: list[MegatronModule], assembly: build.Assembly, recipe: Recipe, world: World,
    *, fresh: bool = True, new: bool = True, kept: bool = True, originals: bool = False,
) -> tuple[build.Assembly, Adapters]:  # fmt: skip
    """Load the weights that adapters belong to, as `load_base` does, and put adapters beside them: those of `lora.init` if they begin `new`.

    `originals`: passes without the adapters will be wanted, also where they are no reference, with copies of the weights that are trained
    whole beside them.
    """
    assembly = load_base(chunks, assembly, recipe, world, fresh=fresh, kept=kept)
    adapters = initial_weights.attach_adapters(chunks, assembly, recipe, world)
    if originals or recipe.train.reference == "base":
        adapters.whole.keep_originals()
    if new:
        start(adapters, recipe)
    return assembly, adapters


def load_base(
    chunks: list[MegatronModule], assembly: build.Assembly, recipe: Recipe, world: World, *, fresh: bool, kept: bool
) -> build.Assembly:
    """Load the weights that adapters will belong to; the assembly with the Hugging Face folder they lie in as its source.

    Where model.init is none, is quantised, or has an adapter merged into it, that folder is base/ in the run's; a `fresh` run writes it, unless its adapters are not
    `kept`: the assembly is returned as it came then. A target that means no linear is reported before any weight is read.
    """
    source = assembly.source
    arch = {} if source is None else read_arch(source.files)
    find_targets(chunks, assembly.family, arch, recipe, TorchComm.from_groups(world.groups))
    if source is not None and source.kind == "hf" and not (quantisation(arch) or recipe.lora.merge_first):
        initial_weights.init_weights(chunks, assembly, recipe, world)
        return assembly
    assert recipe.run.dir is not None
    folder = Path(recipe.run.dir)
    if not fresh:
        based = replace(assembly, source=agreed(lambda: loading.started_from(locate(str(folder)))))
        initial_weights.init_weights(chunks, based, recipe, world)
        return based
    initial_weights.init_weights(chunks, assembly, recipe, world)
    if recipe.lora.merge_first is not None:
        merge(chunks, expanded(recipe.lora.merge_first), assembly, recipe, world)
    if not kept:
        return assembly
    about = partial(model_card.untrained, source)
    export(chunks, folder / BASE, assembly, world, source, card=about, overwrite="aside")
    return replace(assembly, source=locate(str(folder / BASE)))


def merge(chunks: list[MegatronModule], folder: Path, assembly: build.Assembly, recipe: Recipe, world: World) -> None:
    """Add an adapter in PEFT's format to the weights; UserError where it is none of this model's linears."""
    where = str(folder / CONFIG)
    own = peft.settings_of(agreed(lambda: read_object(folder / CONFIG)), where)
    changes = {**own, "init": str(folder), "parts": list(assembly.family.all_parts)}
    first = replace(recipe, lora=LoraConfig(**changes), train=replace(recipe.train, lr_scale={}))
    try:
        adapters = initial_weights.attach_adapters(chunks, assembly, first, world)
    except UserError as error:  # its keys are the folder's, not the recipe's
        raise UserError(f"{where}: {error}") from error
    start(adapters, first)
    adapters.merge()


def start(adapters: Adapters, recipe: Recipe) -> None:
    """Take the adapters of `lora.init`, where the recipe has one."""
    if recipe.lora.init is not None:
        folder = expanded(recipe.lora.init)
        together(adapters.comm, lambda: _read(adapters, folder, recipe))


def _read(adapters: Adapters, folder: Path, recipe: Recipe) -> None:
    config = read_object(folder / CONFIG)
    lora, whole = recipe.lora, adapters.whole
    peft.check_config(
        config,
        str(folder / CONFIG),
        sizes_of(recipe, adapters.renames),
        [*adapters.linears, *adapters.stacks],
        whole.head,
        dora=lora.dora,
        whole_parts=lora.whole_parts,
    )
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"lora.init={recipe.lora.init}: no {WEIGHTS} there; wanted an adapter's folder")
    header = read_header(file)
    shapes = {name: shape for adapted in adapters.held for name, shape in _shapes(adapters, adapted).items()}
    for saved, parameter in whole.saved:
        shapes |= saved.shapes(tuple(parameter.shape), adapters.dims)
    file_names: dict[str, list[str]] = {}  # of a module's former and later name, by the former
    for name in header:
        file_names.setdefault(adapters.renames.former(name), []).append(name)
    wanted = _names(adapters) - _left_out(whole, file_names.keys())
    in_file = {name: tuple(header[names[0]].shape) for name, names in file_names.items()}
    stored, zeros = stored_as(in_file, adapters.published, adapters.stacks)
    peft.match({name: tensor.shape for name, tensor in stored.items()}, wanted, shapes, str(folder))
    with safe_open(file, framework="pt") as opened:

        def read(name: str) -> Tensor:
            tensor, *others = (opened.get_tensor(each) for each in file_names[name])
            if not all(torch.equal(tensor, other) for other in others):
                both = " and ".join(file_names[name])
                raise UserError(f"{file}: {both} are of one module and differ; leave out those that are out of date")
            return tensor

        if trained := [name for name in zeros if read(name).any()]:
            peft.match(dict.fromkeys(trained, ()), (), {}, str(folder))

        def get(name: str) -> Tensor:
            return stored[name].join([read(part) for part in stored[name].names])

        for adapted in adapters.held:
            names = tensor_names(adapted.target.named, adapters.stacks)
            pairs, shape = [(get(a), get(b)) for a, b in names], adapters.full_shape(adapted)
            a, b = peft.to_zoo(adapted.target, pairs, shape, adapters.dims)
            adapters.fill(adapted, a=a, b=b)
            if lora.dora:
                parts = [get(name)[:, None] for name in magnitude_names(adapted.target.named)]
                adapters.fill(adapted, m=peft.rows_to_zoo(adapted.target, parts, shape, adapters.dims)[:, 0])
        for saved, parameter in whole.saved:
            if file_names.keys() >= set(saved.names):
                tensors = [read(name) for name in saved.names]
                parameter.detach().copy_(saved.to_zoo(tensors, adapters.dims))


def _left_out(whole: WholeParts, there: Collection[str]) -> set[str]:
    """Names that a file may lack: a head's, where it is of a language model, and those of parts that were not trained. They stay as they are."""
    heads = {name for name in whole.names if whole.head and name.startswith(f"{PREFIX}{whole.head}.")}
    groups = (heads, whole.names - heads)
    return {name for group in groups if group.isdisjoint(there) for name in group}


def _names(adapters: Adapters) -> set[str]:
    """The names of all tensors in PEFT's format, whichever rank has them."""
    every = [*adapters.linears, *adapters.stacks]
    names = {*adapters.whole.names, *(name for pair in tensor_names(every, adapters.stacks) for name in pair)}
    return names | set(magnitude_names(adapters.linears) if adapters.dora else ())


def _shapes(adapters: Adapters, adapted: AdaptedWeight) -> dict[str, tuple[int, ...]]:
    """The shapes of a target's tensors in PEFT's format, by name."""
    shape, rank = adapters.full_shape(adapted), adapted.target.rank
    with torch.device("meta"):
        if adapted.target.stacked:
            a, b = torch.empty(shape[0], rank, shape[2]), torch.empty(*shape[:2], rank)
        else:
            a, b = torch.empty(len(adapted.target.named) * rank, shape[1]), torch.empty(shape[0], rank)
    pairs = to_peft(adapted.target, a, b, adapters.dims)
    names = tensor_names(adapted.target.named, adapters.stacks)
    shapes = {
        name: tuple(tensor.shape) for pair in zip(names, pairs, strict=True) for name, tensor in zip(*pair, strict=True)
    }
    if adapters.dora:
        shapes |= {name: (len(b),) for name, (_, b) in zip(magnitude_names(adapted.target.named), pairs, strict=True)}
    return shapes


def export_adapters(
    adapters: Adapters, target: Path, assembly: build.Assembly, recipe: Recipe, world: World, steps: int,
    *, adapter_format: AdapterFormat = "peft", dtype: torch.dtype | None = None, overwrite: bool | Literal["aside"] = "aside",
) -> Path:  # fmt: skip
    """Write the adapters as a folder that peft loads onto the weights they belong to; call it on every rank. `steps` are done.

    Each rank writes what it owns under another name, and the first one joins these into one file: so no rank holds adapters
    of another pipeline stage. The folder appears when it is whole.
    """
    comm = adapters.comm
    with ExportWriter(target, overwrite=overwrite) as writer:
        together(comm, lambda: writer.begin() if world.is_main else None)
        local_tensors = {name: tensor.to("cpu", dtype) for name, tensor in _tensors(adapters)}
        together(comm, lambda: _write(local_tensors, writer.partial, world.rank))
        commit = partial(_commit, writer, adapters, assembly, recipe, steps, adapter_format)
        together(comm, lambda: commit() if world.is_main else None)
    return target


def for_servers(adapters: Adapters, assembly: build.Assembly, form: AdapterFormat = "peft") -> str:
    """How vLLM serves these adapters in that format, for a reader; empty where it loads them as they are."""
    if adapters.not_served:
        return f"zoo convert RUN FOLDER, which merges it: vLLM and SGLang do not load {adapters.not_served}"
    experts = {name.rpartition(".")[0] for name in adapters.stacks}
    both = assembly.family.load("bridge").stacked_adapters and len(adapters.stacks) == 2 * len(experts)
    return "" if form == "vllm" or both or not experts else "zoo convert RUN FOLDER adapter_format=vllm"


def _tensors(adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """PEFT's tensors that this rank writes; all ranks must ask."""
    for adapted in adapters.held:
        yield from _pairs(adapters, adapted)
    if adapters.shard.dp_rank == 0 and adapters.shard.tp_rank == 0:
        yield from adapters.whole.tensors(adapters.dims).items()


def _pairs(adapters: Adapters, adapted: AdaptedWeight) -> Iterator[tuple[str, Tensor]]:
    """PEFT's tensors of a target, on the rank that writes them; all ranks that share its parameters must ask."""
    shard, comm, rule = adapters.shard, adapters.comm, adapted.target.entry.rule
    stacked, kind = rule.stacked, rule.shard_for(adapters.dims)
    if (shard.edp_rank if stacked else shard.dp_rank) != 0:
        return
    full: dict[str, Tensor] = {}
    for name in adapted.adapter.cuts:
        local = getattr(adapted.adapter, name).detach()
        if stacked and shard.ep_size > 1:
            local = torch.cat(comm.gather(local, "ep"))
        axis = shard_axis(kind)
        if adapted.adapter.cuts[name].axis is None or shard.on(axis)[1] == 1:
            full[name] = local
            continue
        pieces = comm.gather(local, axis)
        experts = [join(list(parts), kind) for parts in zip(*pieces, strict=True)] if stacked else []
        full[name] = torch.stack(experts) if stacked else join(pieces, kind)
    if (shard.etp_rank or shard.ep_rank) if stacked else shard.tp_rank:
        return
    names = tensor_names(adapted.target.named, adapters.stacks)
    pairs = to_peft(adapted.target, full["a"], full["b"], adapters.dims)
    for pair, tensors in zip(names, pairs, strict=True):
        yield from zip(pair, tensors, strict=True)
    if "m" in full:
        parts = magnitudes(adapted.target, full["m"], adapters.dims)
        yield from zip(magnitude_names(adapted.target.named), parts, strict=True)


def gathered(adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and tensor of all adapters, on every rank, one after the other; call it on every rank."""
    comm = adapters.comm
    device = adapters.held[0].weight.device if adapters.held else torch.device("cpu")
    local_tensors = {name: tensor.contiguous() for name, tensor in _tensors(adapters)}
    held = comm.gather_objects([(name, tuple(t.shape), t.dtype) for name, t in local_tensors.items()])
    for rank, tensors_of_rank in enumerate(held):
        for name, shape, dtype in tensors_of_rank:
            tensor = local_tensors[name] if rank == comm.rank else torch.empty(shape, dtype=dtype, device=device)
            if len(held) > 1:
                torch.distributed.broadcast(tensor, src=rank)
            yield name, tensor


def peft_config_of(adapters: Adapters, assembly: build.Assembly, recipe: Recipe) -> JsonObject:
    """PEFT's adapter_config.json of these adapters."""
    return adapters.renames.config(_config_of(adapters, assembly, recipe))


def as_vllm(
    tensors: Mapping[str, Tensor], adapters: Adapters, assembly: build.Assembly, recipe: Recipe
) -> tuple[dict[str, Tensor], JsonObject]:
    """Tensors by the names of `gathered` as vLLM loads them, and their adapter_config.json."""
    stacked, names = assembly.family.load("bridge").stacked_adapters, (adapters.published, adapters.stacks)
    made = to_vllm(tensors, *names, adapters.dims.experts, stacked=stacked)
    return made, vllm_config(_config_of(adapters, assembly, recipe), *names, stacked=stacked)


def _config_of(adapters: Adapters, assembly: build.Assembly, recipe: Recipe) -> JsonObject:
    """The same under the former names of modules alone."""
    assert assembly.source is not None
    init, settings, whole = recipe.model.init, recipe.lora, adapters.whole
    base_in_run = assembly.source.folder == Path(recipe.run.dir or "") / BASE
    base = init if is_hub_id(init) and not base_in_run else str(assembly.source.folder.absolute())
    return peft.peft_config(
        adapters.linears, adapters.stacks, sizes_of(recipe, adapters.renames), dora=settings.dora, dropout=settings.dropout,
        base=base, experts=adapters.dims.experts > 0, whole=whole.modules, head=whole.head,
    )  # fmt: skip


def _write(tensors: Mapping[str, Tensor], folder: Path, rank: int, label: str = "rank") -> list[Path]:
    """The tensors as one file, if there are any."""
    planned = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with ShardWriter(folder, planned, rank=rank, shard_bytes=sys.maxsize, label=label) as writer:
        for tensor in writer.order:
            writer.write(tensor.name, [tensors[tensor.name]])
    return [folder / shard.file for shard in writer.shards]


def _commit(
    writer: ExportWriter, adapters: Adapters, assembly: build.Assembly, recipe: Recipe, steps: int, form: AdapterFormat
) -> None:
    """On rank 0: one file of all ranks' tensors, PEFT's config, the processor's files; then the folder's name."""
    assert assembly.source is not None
    parts = sorted(writer.partial.glob("rank*"))
    tensors: dict[str, Tensor] = {}
    for part in parts:
        with safe_open(part, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    assert tensors.keys() == _names(adapters), sorted(tensors.keys() ^ _names(adapters))
    if form == "vllm":
        tensors, config = as_vllm(tensors, adapters, assembly, recipe)
    else:
        tensors = {each: tensor for name, tensor in tensors.items() for each in adapters.renames.both(name)}
        config = peft_config_of(adapters, assembly, recipe)
    (file,) = _write(tensors, writer.partial, 0, "whole")
    with disk_errors(writer.partial):
        file.rename(writer.partial / WEIGHTS)
        for part in parts:
            part.unlink()
        (writer.partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        assembly.served.save_pretrained(writer.partial)
        arch = read_arch(assembly.source.files)
        ends, servers = assembly.processor.ends, for_servers(adapters, assembly, form)
        about = model_card.trained(recipe, steps, assembly.source, arch, adapter=True, ends=ends, servers=servers)
        write_card(writer.partial, writer.target, about)
    writer.replace_target()
