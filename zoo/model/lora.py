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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.bridge import Dims, ShardInfo, TorchComm
from zoo.bridge.mapping.peft import candidates, choose
from zoo.bridge.mapping.peft_targets import Renames, Sizes, Target, refuse_without_dora
from zoo.bridge.parallel import cut, full_shape, model_parameters, together
from zoo.config.architecture import num_experts
from zoo.config.schema import Recipe
from zoo.model.whole_parts import WholeParts, find_whole_parts
from zoo.nn.backend import get_backend
from zoo.nn.decoder import lora
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.nn.decoder.frozen.modules import dense_weight
from zoo.parallel.world import World
from zoo.registry import ModelFamily
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.module import MegatronModule

type Linears = dict[str, tuple[torch.nn.Module, torch.nn.Parameter]]
"""Name of a weight -> its module and itself."""

type Adapter = lora.LinearAdapter | lora.ExpertAdapter


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight with an adapter, or this rank's part of it."""

    target: Target
    module: torch.nn.Module  # the linear, or the experts
    weight: torch.nn.Parameter
    adapter: Adapter

    def merged(self) -> Tensor:
        """The weight with its adapter added."""
        weight = dense_weight(self.weight)
        merged = weight.detach().to(torch.float32, copy=True)
        self.adapter.add_to(merged)
        return merged.to(weight.dtype)

    def attach(self) -> None:
        """Have the module add the adapter's output."""
        if isinstance(self.adapter, lora.ExpertAdapter):
            self._experts_adapters[self.target.zoo.rpartition(".")[2]] = self.adapter
        else:
            lora.attach(self.module, self.adapter)

    def detach(self) -> None:
        """Take away the adapter that `attach` has added to the module."""
        if isinstance(self.adapter, lora.ExpertAdapter):
            del self._experts_adapters[self.target.zoo.rpartition(".")[2]]
        else:
            lora.detach(self.module)

    @property
    def _experts_adapters(self) -> torch.nn.ModuleDict:
        assert isinstance(self.module, GroupedExperts)
        return self.module.lora


@dataclass(frozen=True)
class Adapters:
    """All adapters of a model, as one rank has them, and what is trained beside them."""

    held: Sequence[AdaptedWeight]
    linears: Sequence[str]  # transformers' modules that have an adapter, of all ranks
    stacks: Sequence[str]  # experts' parameters that have an adapter, of all ranks
    frozen: Sequence[torch.nn.Parameter]  # parameters that a run without adapters would train
    dims: Dims
    shard: ShardInfo
    comm: TorchComm
    whole: WholeParts
    published: Mapping[str, str]  # of all of these modules and parameters: name in transformers -> published one
    not_served: str  # what vLLM and SGLang do not load, in words; empty where they load all that is trained
    renames: Renames
    dora: bool = False

    def named(self) -> dict[str, Tensor]:
        """This rank's parameters, by names that no parallel layout changes."""
        return {
            f"{adapted.target.zoo}.lora.{name}": getattr(adapted.adapter, name)
            for adapted in self.held
            for name in adapted.adapter.cuts
        } | dict(self.whole.trained)

    def sharded(self) -> dict[str, ShardedTensor]:
        """The parameters as megatron-core's checkpoints take them, by the names of `named`."""
        return {
            key: tensor
            for adapted in self.held
            for key, tensor in adapted.adapter.sharded(f"{adapted.target.zoo}.lora.").items()
        } | self.whole.sharded(self.shard)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parameters from tensors by the names of `named`."""
        for name, parameter in self.named().items():
            parameter.copy_(tensors[name])

    def full_shape(self, adapted: AdaptedWeight) -> tuple[int, ...]:
        """The shape of the whole weight, which ranks share."""
        return full_shape(adapted.weight.shape, adapted.target.entry.rule.shard_for(self.dims), self.shard)

    @torch.no_grad()
    def fill(self, adapted: AdaptedWeight, **parameters: Tensor) -> None:
        """Cut this rank's part out of full `a` and `b` and, with DoRA, `m`."""
        rule = adapted.target.entry.rule
        for name, full in parameters.items():
            parameter = getattr(adapted.adapter, name)
            kind = rule.shard_for(self.dims) if adapted.adapter.cuts[name].axis is not None else None
            if not rule.stacked:
                parameter.copy_(cut(full, kind, self.shard))
                continue
            first = self.shard.ep_rank * len(parameter)
            for local in range(len(parameter)):
                parameter[local].copy_(cut(full[first + local], kind, self.shard))

    @torch.no_grad()
    def start_magnitudes(self) -> None:
        """DoRA's, so that adapters whose B is zero add nothing; every rank calls it once the weights are as they stay."""
        for adapted in self.held:
            if "m" in adapted.adapter.cuts:
                assert isinstance(adapted.adapter, lora.LinearAdapter)
                adapted.adapter.m.copy_(adapted.adapter.norm(dense_weight(adapted.weight)))

    @torch.no_grad()
    def merge(self) -> None:
        """Add every adapter to its weight and remove it; unfreeze the other parameters."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        for adapted in self.held:
            adapted.weight.copy_(adapted.merged())
            adapted.detach()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model computes without the adapters, with the weights from before training."""
        for adapted in self.held:
            adapted.detach()
        try:
            with self.whole.originals():
                yield
        finally:
            for adapted in self.held:
                adapted.attach()

    def freeze_others(self) -> None:
        """Stop training parameters without an adapter: an export then copies them from their source."""
        changed = {id(adapted.weight) for adapted in self.held}
        for parameter in self.frozen:
            parameter.requires_grad_(id(parameter) in changed)


def attach_new(
    chunks: Sequence[MegatronModule], family: ModelFamily, dims: Dims, arch: JsonMapping, recipe: Recipe, world: World
) -> Adapters:
    """New adapters for the weights that `recipe.lora` targets, B zero; all other parameters but those trained whole are frozen.

    Arguments and errors are those of `attach_zeros`. A follows from `run.seed` and the weight's name, whatever the parallel
    layout, and is drawn as in PEFT: uniform within 1 / sqrt(in).
    """
    adapters = attach_zeros(chunks, family, dims, arch, recipe, world)
    for adapted in adapters.held:
        _draw(adapters, adapted, recipe.run.seed)
    seed_dropout(recipe, 0, world)
    return adapters


def attach_zeros(
    chunks: Sequence[MegatronModule], family: ModelFamily, dims: Dims, arch: JsonMapping, recipe: Recipe, world: World
) -> Adapters:
    """Adapters of zeros, also for weights on the meta device. Every rank calls it.

    Args:
        arch: config.json of the base weights.

    Raises:
        UserError: a target names no linear.
    """
    settings, comm = recipe.lora, TorchComm.from_groups(world.groups)
    linears, chosen = find_targets(chunks, family, arch, recipe, comm)
    everywhere = comm.gather_objects([(name, target.stacked) for target in chosen for name in target.named])
    named = dict(pair for of_rank in everywhere for pair in of_rank)
    names = {name: hub_name for target in chosen for name, hub_name in target.published_by_name.items()}
    published = {name: hub_name for of_rank in comm.gather_objects(names) for name, hub_name in of_rank.items()}
    parts = comm.gather_objects({family.part_of(target.zoo, recipe.named_parts) for target in chosen})
    parameters = dict(model_parameters(chunks))
    whole = find_whole_parts(parameters, family, arch, recipe, comm)
    frozen = [p for name, p in parameters.items() if p.requires_grad and name not in whole.trained]
    for parameter in frozen:
        parameter.requires_grad_(False)
    held = [_attach(target, *linears[target.zoo], dims, recipe, world) for target in chosen]
    modules, stacks = ([name for name in named if named[name] == stacked] for stacked in (False, True))
    shard = ShardInfo.from_groups(world.groups)
    towers = [f"adapters in {part}" for part in sorted(set().union(*parts) - {"language"})]
    wholes = [*settings.whole_parts, *(["the head"] if whole.head else [])]
    own = [
        *(["DoRA"] if settings.dora else []),
        *(["adapters of several scales"] if settings.rank_pattern or settings.alpha_pattern else []),
    ]
    not_served = ", ".join([*own, *towers, *(f"{part} (trained whole)" for part in wholes)])
    renames = renames_of(family, arch)
    return Adapters(
        held, modules, stacks, frozen, dims, shard, comm, whole, published, not_served, renames, settings.dora
    )


@dataclass(frozen=True)
class AdaptedPart:
    """The weights of a part of a model that have adapters, so that a copy of the part gets alike ones."""

    targets: Sequence[Target]

    @classmethod
    def from_adapters(cls, adapters: Adapters | None, names: Collection[str]) -> AdaptedPart:
        """Those of weights of these names."""
        held = adapters.held if adapters is not None else ()
        return cls([weight.target for weight in held if weight.target.zoo in names])

    def attach(self, model: MegatronModule, dims: Dims, recipe: Recipe, world: World) -> None:
        """Adapters without values."""
        linears = linears_of([model], recipe) if self.targets else {}
        for target in self.targets:
            _attach(target, *linears[target.zoo], dims, recipe, world)


def renames_of(family: ModelFamily, arch: JsonMapping) -> Renames:
    """Names that later transformers has for modules of a model of that config.json."""
    return Renames(family.load("bridge").renamed_modules(arch))


def sizes_of(recipe: Recipe, renames: Renames) -> Sizes:
    """Rank and alpha of every module."""
    lora = recipe.lora
    return Sizes(lora.rank, lora.alpha, lora.rslora, lora.rank_pattern, lora.alpha_pattern, renames)


def without_memory(chunks: Sequence[MegatronModule]) -> None:
    """Move parameters from the meta device to the CPU with one number of memory each, so that adapters there have memory."""
    for chunk in chunks:
        for module in chunk.modules():
            for name, parameter in module.named_parameters(recurse=False):
                same = parameter.new_zeros(1, device="cpu").expand(parameter.shape)
                module.register_parameter(name, torch.nn.Parameter(same, parameter.requires_grad))


def find_targets(
    chunks: Sequence[MegatronModule], family: ModelFamily, arch: JsonMapping, recipe: Recipe, comm: TorchComm
) -> tuple[Linears, list[Target]]:
    """This rank's linears, and the targets of `recipe.lora` among them; UserError where a target is on no rank."""
    linears = {
        name: (module, parameter)
        for name, (module, parameter) in linears_of(chunks, recipe).items()
        if parameter.requires_grad
        and family.part_of(name, recipe.named_parts) in recipe.lora.parts
        and not name.startswith(
            "multi_token."
        )  # nor embedding, routers and a talker's heads of residual codes, which are no linears
        and "output_layer" not in name.split(".")
    }
    targets = candidates(linears, family.load("bridge"), arch)
    names = comm.gather_objects([name for target in targets for name in target.modules])
    everywhere = sorted({name for of_rank in names for name in of_rank})
    renames = renames_of(family, arch)

    def chosen() -> list[Target]:
        with_adapters = choose(targets, recipe.lora.targets, everywhere, renames)
        sizes = sizes_of(recipe, renames)
        sizes.refuse_unmatched(everywhere)
        if recipe.lora.dora:
            refuse_without_dora(with_adapters, has_experts=num_experts(arch) > 0)
        return [sizes.sized(target) for target in with_adapters]

    return linears, together(comm, chosen)


def linears_of(chunks: Sequence[MegatronModule], recipe: Recipe) -> Linears:
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


def _attach(
    target: Target, module: torch.nn.Module, weight: torch.nn.Parameter, dims: Dims, recipe: Recipe, world: World
) -> AdaptedWeight:
    scales, settings = target.scales, recipe.lora
    several = scales if len(set(scales)) > 1 else ()
    lowrank = lora.Lowrank(target.rank, scales[0], settings.dropout, settings.dora, several)
    shard, rows = ShardInfo.from_groups(world.groups), weight.shape[0]
    kind = target.entry.rule.shard_for(dims)
    split: lora.Split | None = None if kind is None else "columns" if kind in ("tp1", "expert2") else "rows"
    adapter: Adapter
    sections: tuple[int, ...]  # rows of this rank's weight that are cut separately
    if target.stacked:
        assert split is not None
        sections = (weight.shape[1] // 2,) * 2 if split == "rows" else ()
        adapter = lora.ExpertAdapter(weight, lowrank, world.groups, split=split, sections=sections)
    else:
        with torch.device("cpu"):  # the weight may be on the meta device
            owner = target.owner(full_shape(weight.shape, kind, shard), dims)
        if split == "rows":
            owner = cut(owner[:, None], kind, shard)[:, 0]
        if kind == "tp0-gateup":
            sections = (rows // 2,) * 2
        else:
            sections = tuple(size // shard.tp_size for size in getattr(kind, "sizes", (rows * shard.tp_size,)))
        sequence_parallel = bool(recipe.parallel.sp)
        adapter = lora.LinearAdapter(
            weight, lowrank, owner, world.groups, split=split, sections=sections, sequence_parallel=sequence_parallel
        )
    adapted = AdaptedWeight(target, module, weight, adapter)
    adapted.attach()
    return adapted


def _draw(adapters: Adapters, adapted: AdaptedWeight, seed: int) -> None:
    """Draw A as PEFT does (kaiming uniform of slope sqrt 5), the same under any parallel layout; B stays zero."""
    shape, target = adapters.full_shape(adapted), adapted.target
    count = shape[0] if target.stacked else len(target.named)
    bound = 1 / math.sqrt(shape[-1])

    def drawn(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{target.zoo}.lora.a/{index}".encode()))
        rank = target.ranks[0 if target.stacked else index]
        a = torch.empty(rank, shape[-1]).uniform_(-bound, bound, generator=generator)
        return F.pad(a, (0, 0, 0, target.rank - rank))

    with torch.device("cpu"):
        parts = [drawn(index) for index in range(count)]
        b = torch.zeros(*shape[:-1], target.rank)
    adapters.fill(adapted, a=torch.stack(parts) if target.stacked else torch.cat(parts), b=b)


def counts(adapters: Adapters | None) -> tuple[int, int]:
    """This rank's parameters in adapters, and those trained whole beside them."""
    if adapters is None:
        return 0, 0
    every, whole = (sum(p.numel() for p in named.values()) for named in (adapters.named(), adapters.whole.trained))
    return every - whole, whole


def seed_dropout(recipe: Recipe, step: int, world: World) -> None:
    """Seed the dropout masks of a step: they follow from `run.seed`, step and rank, so a resumed run has the same."""
    if not recipe.lora.dropout:
        return
    coordinates = f"{recipe.run.seed}/{step}/{world.pp_rank}/{world.dp_rank}/{world.cp_rank}"
    shared, rank_seed = (zlib.crc32(text.encode()) for text in (coordinates, f"{coordinates}/{world.tp_rank}"))
    lora.seed_dropout(world.device, shared, rank_seed)


def settings_of(recipe: Recipe) -> JsonObject:
    """The settings that a checkpoint keeps, so that its adapters can be loaded."""
    kept = ("rank", "alpha", "targets", "parts")
    if_set = ("rslora", "dora", "rank_pattern", "alpha_pattern", "whole_parts")
    return {key: value for key, value in asdict(recipe.lora).items() if key in kept or (key in if_set and value)}
