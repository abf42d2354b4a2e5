"""Weights that are trained whole beside adapters: those of `lora.whole_parts`, and a reward model's head.

Every tensor-parallel rank of the first pipeline stage holds a tower or projector whole, and of the last one the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from zoo.bridge import Dims, ShardInfo, TorchComm
from zoo.bridge.mapping.peft import Saved, modules_to_save
from zoo.bridge.mapping.peft_targets import PREFIX
from zoo.bridge.mapping.table import SCORE
from zoo.config.schema import Recipe
from zoo.registry import ModelFamily
from zoo.types import JsonMapping

type Parameters = Mapping[str, torch.nn.Parameter]
"""Parameters by zoo's names."""


@dataclass(frozen=True)
class WholeParts:
    """What is trained whole beside adapters, as one rank has it."""

    trained: Parameters  # of this rank
    modules: Sequence[str]  # transformers' modules that they are in, of all ranks: PEFT's modules_to_save
    names: frozenset[str]  # PEFT's names of all tensors in these modules, of all ranks
    saved: Sequence[tuple[Saved, torch.nn.Parameter]]  # this rank's weights in these modules
    kept_frozen: Sequence[str]  # weights of the parts that no module holds by itself, of all ranks
    head: str | None  # the module that is a reward model's head
    _originals: dict[str, Tensor] = field(default_factory=dict)  # what `keep_originals` has copied

    def tensors(self, dims: Dims) -> dict[str, Tensor]:
        """PEFT's names and tensors of this rank's weights."""
        return {
            name: tensor
            for saved, parameter in self.saved
            for name, tensor in saved.to_peft(parameter.detach(), dims).items()
        }

    def sharded(self, shard: ShardInfo) -> dict[str, ShardedTensor]:
        """The trained weights as megatron-core's checkpoints take them."""
        replica = (0, shard.tp_rank, shard.dp_rank)
        return {
            name: ShardedTensor.from_rank_offsets(name, weight, replica_id=replica)
            for name, weight in self.trained.items()
        }

    def allocate(self) -> None:
        """Give weights of chunks `without_memory` their own."""
        for parameter in self.trained.values():
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)

    def keep_originals(self) -> None:
        """Keep a copy of the present weights, for `originals`. A head has none: the model without adapters lacks it."""
        for name, parameter in self.trained.items():
            if name != SCORE:
                self._originals[name] = parameter.detach().clone()

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Within the block the model computes with the weights that `keep_originals` has copied."""
        assert self._originals.keys() == self.trained.keys() - {SCORE}
        held = {name: self.trained[name].data for name in self._originals}
        for name, tensor in self._originals.items():
            self.trained[name].data = tensor
        try:
            yield
        finally:
            for name, tensor in held.items():
                self.trained[name].data = tensor


def find_whole_parts(
    parameters: Parameters, family: ModelFamily, arch: JsonMapping, recipe: Recipe, comm: TorchComm
) -> WholeParts:
    """The weights among this rank's parameters that a recipe with adapters trains whole; every rank calls it."""
    bridge, wanted = family.load("bridge"), recipe.lora.whole_parts
    parts = [name for name in parameters if family.part_of(name, recipe.named_parts) in wanted and name != SCORE]
    parts += [SCORE] if recipe.train.scores and SCORE in parameters else []
    modules: list[str] = []
    saved: list[Saved] = []
    if parts:
        trained = [name for name in parts if parameters[name].requires_grad]
        modules, saved = modules_to_save(parameters, parts, trained, bridge, arch)
    in_modules = {weight.zoo for weight in saved}
    trained = [name for name in parts if parameters[name].requires_grad]
    left = [name for name in trained if name not in in_modules]
    heads = [weight.names[0].removeprefix(PREFIX).removesuffix(".weight") for weight in saved if weight.zoo == SCORE]
    names = [name for weight in saved for name in weight.names]
    of_ranks = comm.gather_objects((modules, names, left, heads))
    all_modules, all_names, all_left, all_heads = (
        [value for values in lists for value in values] for lists in zip(*of_ranks, strict=True)
    )
    return WholeParts(
        {name: parameters[name] for name in trained if name in in_modules},
        sorted(set(all_modules)),
        frozenset(all_names),
        [(weight, parameters[weight.zoo]) for weight in saved],
        sorted(set(all_left)),
        all_heads[0] if all_heads else None,
    )
