"""LoRA adapters of a model: added to the weights that a recipe targets, loaded, and merged.

The model's own weights are frozen: they have no gradient and no optimizer state, and a run's checkpoints hold adapters
alone. Parts of `lora.whole_parts` are the exception, and a reward model's head, as the base weights may have none: they are trained,
saved and exported whole (`zoo.model.whole_parts`).
The base weights of the adapters lie where `model.init` says; where that is no Hugging Face folder (random weights, a run), the
run writes the base weights to `base/` once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.bridge import Dims, ShardInfo, TorchComm
from zoo.bridge.mapping.peft import Target, candidates, choose
from zoo.bridge.parallel import cut, full_shape, model_parameters, together
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model import whole_parts
from zoo.model.whole_parts import WholeParts
from zoo.nn.backend import get_backend
from zoo.nn.decoder import frozen_fp8, lora
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.parallel.world import World
from zoo.registry import ModelFamily

Linears = dict[str, tuple[Any, torch.nn.Parameter]]  # name of a weight -> its module and itself


@dataclass(frozen=True)
class Held:
    """An adapter whose weight, or a part of it, is on this rank."""

    target: Target
    module: Any  # the linear, or the experts
    weight: torch.nn.Parameter
    adapter: Any  # zoo.nn.decoder.lora.LinearAdapter, or ExpertAdapter

    def merged(self) -> Tensor:
        """The weight with its adapter added."""
        weight = frozen_fp8.dense_weight(self.module, self.weight)
        return (weight.float() + self.adapter.delta()).to(weight.dtype)

    def put_on(self) -> None:
        """Have the module add what the adapter gives."""
        if self.target.stacked:
            self.module.lora[self.target.zoo.rpartition(".")[2]] = self.adapter
        else:
            lora.attach(self.module, self.adapter)

    def take_off(self) -> None:
        """The module as it was before."""
        if self.target.stacked:
            del self.module.lora[self.target.zoo.rpartition(".")[2]]
        else:
            lora.detach(self.module)


@dataclass(frozen=True)
class Adapters:
    """All adapters of a model, as one rank has them, and what is trained beside them."""

    held: Sequence[Held]
    linears: Sequence[str]  # transformers' modules that have an adapter, of all ranks
    stacks: Sequence[str]  # experts' parameters that have an adapter, of all ranks
    frozen: Sequence[torch.nn.Parameter]  # parameters that are trained in a run without adapters
    dims: Dims
    shard: ShardInfo
    comm: TorchComm
    whole: WholeParts

    def named(self) -> dict[str, Tensor]:
        """This rank's parameters, by names that no parallel layout changes."""
        return {
            f"{one.target.zoo}.lora.{name}": getattr(one.adapter, name) for one in self.held for name in ("a", "b")
        } | dict(self.whole.trained)

    def sharded(self) -> dict[str, Any]:
        """The parameters as megatron-core's checkpoints take them, by the names of `named`."""
        return {
            key: tensor for one in self.held for key, tensor in one.adapter.sharded(f"{one.target.zoo}.lora.").items()
        } | self.whole.sharded(self.shard)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parameters from tensors by the names of `named`."""
        for name, parameter in self.named().items():
            parameter.copy_(tensors[name])

    def full_shape(self, one: Held) -> tuple[int, ...]:
        """The shape of the whole weight, which ranks share."""
        return full_shape(one.weight.shape, one.target.entry.rule.shard_for(self.dims), self.shard)

    @torch.no_grad()
    def fill(self, one: Held, a: Tensor, b: Tensor) -> None:
        """Cut this rank's part out of full `a` and `b`."""
        rule = one.target.entry.rule
        how = rule.shard_for(self.dims)
        for name, full in (("a", a), ("b", b)):
            parameter = getattr(one.adapter, name)
            kind = how if one.adapter.cuts[name].axis is not None else None
            if not rule.stacked:
                parameter.copy_(cut(full, kind, self.shard))
                continue
            first = self.shard.ep_rank * len(parameter)
            for local in range(len(parameter)):
                parameter[local].copy_(cut(full[first + local], kind, self.shard))

    @torch.no_grad()
    def merge(self) -> None:
        """Add every adapter to its weight and remove it; frozen parameters are trained again."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        for one in self.held:
            one.weight.copy_(one.merged())
            one.take_off()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model computes without the adapters, and with the weights that they were put beside."""
        for one in self.held:
            one.take_off()
        try:
            with self.whole.originals():
                yield
        finally:
            for one in self.held:
                one.put_on()

    def freeze_others(self) -> None:
        """Stop training parameters without an adapter: an export then copies them from their source."""
        changed = {id(one.weight) for one in self.held}
        for parameter in self.frozen:
            parameter.requires_grad_(id(parameter) in changed)


def attach(
    chunks: Sequence[Any], family: ModelFamily, dims: Dims, arch: Mapping[str, Any], recipe: Recipe, here: World
) -> Adapters:
    """New adapters for the weights that `recipe.lora` targets, B zero; all other parameters but those trained whole are frozen.

    Arguments and errors are those of `place`. A follows from `run.seed` and the weight's name, whatever the parallel
    layout, and is drawn as in PEFT: uniform within 1 / sqrt(in).
    """
    adapters = place(chunks, family, dims, arch, recipe, here)
    for one in adapters.held:
        _draw(adapters, one, recipe.lora.rank, recipe.run.seed)
    seed_dropout(recipe, 0, here)
    return adapters


def place(
    chunks: Sequence[Any], family: ModelFamily, dims: Dims, arch: Mapping[str, Any], recipe: Recipe, here: World
) -> Adapters:
    """Adapters of zeros, also for weights on the meta device. Every rank calls it.

    Args:
        arch: config.json of the base weights.

    Raises:
        UserError: a target names no linear, or a model chunk would be left without an adapter.
    """
    settings, comm = recipe.lora, TorchComm.from_groups(here.groups)
    linears, chosen = find(chunks, family, arch, recipe, comm)
    everywhere = comm.gather_objects([(name, target.stacked) for target in chosen for name in target.named])
    named = dict(pair for of_rank in everywhere for pair in of_rank)
    parameters = dict(model_parameters(chunks))
    whole = whole_parts.find(parameters, family, arch, recipe, comm)
    frozen = [one for name, one in parameters.items() if one.requires_grad and name not in whole.trained]
    for parameter in frozen:
        parameter.requires_grad_(False)
    lowrank = lora.Lowrank(settings.rank, settings.alpha / settings.rank, settings.dropout)
    held = [_place_one(target, *linears[target.zoo], lowrank, dims, recipe, here) for target in chosen]
    modules, stacks = ([name for name in named if named[name] == stacked] for stacked in (False, True))
    together(comm, lambda: _refuse_empty(chunks, recipe))
    return Adapters(held, modules, stacks, frozen, dims, ShardInfo.from_groups(here.groups), comm, whole)


def without_memory(chunks: Sequence[Any]) -> None:
    """Give the parameters of chunks on the meta device a place on the host, one number each: adapters beside them have memory there."""
    for chunk in chunks:
        for module in chunk.modules():
            for name, parameter in module.named_parameters(recurse=False):
                same = parameter.new_zeros(1, device="cpu").expand(parameter.shape)
                module.register_parameter(name, torch.nn.Parameter(same, parameter.requires_grad))


def quantise_base(chunks: Sequence[Any], recipe: Recipe) -> None:
    """Hold the frozen matrices of the decoder's layers as `lora.base_dtype` says; their weights and adapters are there by now."""
    if recipe.lora.base_dtype != "fp8":
        return
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, (module, parameter) in _linears_of(chunks, recipe).items():
        if name.startswith("decoder.layers.") and not parameter.requires_grad:
            found.setdefault(id(module), (module, []))[1].append(name.rpartition(".")[2])
    for module, names in found.values():
        frozen_fp8.freeze(module, names)


def find(
    chunks: Sequence[Any], family: ModelFamily, arch: Mapping[str, Any], recipe: Recipe, comm: TorchComm
) -> tuple[Linears, list[Target]]:
    """This rank's linears, and the targets of `recipe.lora` among them; UserError where a target is on no rank."""
    linears = _linears(chunks, family, recipe)
    there = candidates(linears, family.load("bridge"), arch)
    names = comm.gather_objects([name for target in there for name in target.modules])
    everywhere = sorted({name for of_rank in names for name in of_rank})
    return linears, together(comm, lambda: choose(there, recipe.lora.targets, everywhere))


def _linears(chunks: Sequence[Any], family: ModelFamily, recipe: Recipe) -> Linears:
    """Linears and experts of `lora.parts` that the model trains, by their weights' names; without embedding, head, routers, MTP."""
    return {
        name: (module, parameter)
        for name, (module, parameter) in _linears_of(chunks, recipe).items()
        if parameter.requires_grad
        and family.part_of(name, recipe.named_parts) in recipe.lora.parts
        and not name.startswith(("output_layer.", "multi_token."))
    }


def _linears_of(chunks: Sequence[Any], recipe: Recipe) -> Linears:
    """This rank's linears and experts, by their weights' names."""
    backend = get_backend(recipe.engine.backend, chunks[0].config)
    kinds = (torch.nn.Linear, backend.column_parallel_linear(), backend.row_parallel_linear(), GroupedExperts)
    modules = {
        id(parameter): module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    }
    return {
        name: (modules[id(parameter)], parameter)
        for name, parameter in model_parameters(chunks)
        if id(parameter) in modules
    }


def _place_one(
    target: Target,
    module: Any,
    weight: torch.nn.Parameter,
    lowrank: lora.Lowrank,
    dims: Dims,
    recipe: Recipe,
    here: World,
) -> Held:
    shard = ShardInfo.from_groups(here.groups)
    how = target.entry.rule.shard_for(dims)
    split: lora.Split | None = None if how is None else "columns" if how in ("tp1", "expert2") else "rows"
    adapter: Any
    if target.stacked:
        sections = (weight.shape[1] // 2,) * 2 if split == "rows" else ()
        assert split is not None
        adapter = lora.ExpertAdapter(weight, lowrank, here.groups, split=split, sections=sections)
        return _held(target, module, weight, adapter)
    shape = full_shape(weight.shape, how, shard)
    with torch.device("cpu"):  # the weight may be on the meta device
        owner = target.owner(shape, dims)
    if split == "rows":
        owner = cut(owner[:, None], how, shard)[:, 0]
    adapter = lora.LinearAdapter(
        weight,
        lowrank,
        owner,
        here.groups,
        split=split,
        sections=_sections(how, weight.shape[0], shard),
        sequence_parallel=bool(recipe.parallel.sp),
    )
    return _held(target, module, weight, adapter)


def _held(target: Target, module: Any, weight: torch.nn.Parameter, adapter: Any) -> Held:
    held = Held(target, module, weight, adapter)
    held.put_on()
    return held


def _sections(how: Any, rows: int, shard: ShardInfo) -> tuple[int, ...]:
    """Rows of this rank's weight that are cut separately."""
    if how == "tp0-gateup":
        return (rows // 2,) * 2
    return tuple(size // shard.tp_size for size in getattr(how, "sizes", (rows * shard.tp_size,)))


def _refuse_empty(chunks: Sequence[Any], recipe: Recipe) -> None:
    for chunk in chunks:
        if not any(parameter.requires_grad for parameter in chunk.parameters()):
            raise UserError(
                f"lora.targets={','.join(recipe.lora.targets)} in lora.parts={','.join(recipe.lora.parts)}: a pipeline "
                f"stage has no such linear, so nothing to train; give parallel.pp=1, or more targets or parts"
            )


def _draw(adapters: Adapters, one: Held, rank: int, seed: int) -> None:
    """A as PEFT draws it (kaiming uniform of slope sqrt 5), the same under any parallel layout; B stays zero."""
    shape = adapters.full_shape(one)
    count = shape[0] if one.target.stacked else len(one.target.named)
    bound = 1 / math.sqrt(shape[-1])

    def drawn(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{one.target.zoo}.lora.a/{index}".encode()))
        return torch.empty(rank, shape[-1]).uniform_(-bound, bound, generator=generator)

    with torch.device("cpu"):
        parts = [drawn(index) for index in range(count)]
        b = torch.zeros(*shape[:-1], rank)
    adapters.fill(one, torch.stack(parts) if one.target.stacked else torch.cat(parts), b)


def counts(adapters: Adapters | None) -> tuple[int, int]:
    """This rank's parameters in adapters, and those trained whole beside them."""
    if adapters is None:
        return 0, 0
    every, whole = (sum(one.numel() for one in named.values()) for named in (adapters.named(), adapters.whole.trained))
    return every - whole, whole


def seed_dropout(recipe: Recipe, step: int, here: World) -> None:
    """Seed the dropout masks of a step: they follow from `run.seed`, step and rank, so a resumed run has the same."""
    if not recipe.lora.dropout:
        return
    where = f"{recipe.run.seed}/{step}/{here.pp_rank}/{here.dp_rank}/{here.cp_rank}"
    same, own = (zlib.crc32(text.encode()) for text in (where, f"{where}/{here.tp_rank}"))
    lora.seed_dropout(here.device, same, own)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings that a checkpoint keeps, so that its adapters can be loaded."""
    kept = ("rank", "alpha", "targets", "parts", *(("whole_parts",) if recipe.lora.whole_parts else ()))
    return {key: value for key, value in asdict(recipe.lora).items() if key in kept}
