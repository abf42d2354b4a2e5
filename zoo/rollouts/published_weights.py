"""A model's weights for others while it is trained: published tensors, adapters merged or by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bridge import WeightStream
from zoo.bridge.parallel import model_parameters
from zoo.bridge.weight_shards import WeightShard, weight_shards
from zoo.bridge.weight_stream import BUCKET
from zoo.checkpoint import loading, lora_files
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model import build, lora
from zoo.parallel.world import World
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


class PublishedWeights:
    """Streams of a model's weights as they are now; their plan is made at the first one of each dtype and bucket."""

    def __init__(
        self, assembly: build.Assembly, chunks: Sequence[MegatronModule], adapters: lora.Adapters | None, world: World
    ) -> None:
        self.assembly, self.chunks, self.world = assembly, chunks, world
        self._adapters = adapters
        self._plans: dict[tuple[torch.dtype | None, int], WeightStream] = {}

    def published(
        self, dtype: torch.dtype | None = None, bucket: int = BUCKET, *, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(published name, whole tensor), adapters `merged` or left out."""
        stream = self._stream(dtype, bucket)
        return stream.tensors(self._merged) if merged else stream.tensors()

    def config(self) -> JsonObject:
        """config.json of what is published."""
        return self._stream(None, BUCKET).plan.config

    def shards(self, dtype: torch.dtype | None) -> Iterator[WeightShard]:
        """This rank's blocks of the same tensors."""
        stream = self._stream(dtype, BUCKET)
        return weight_shards(stream.parameters, stream.plan, stream.dims, stream.shard, self._merged)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, whole tensor) of the adapters alone."""
        adapters = self._held()
        for name, tensor in lora_files.gathered(adapters):
            yield from ((each, tensor) for each in adapters.renames.both(name))

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Passes inside the block add nothing of the adapters, and have the first weights of parts that are trained whole."""
        adapters = self._held()
        held = [(entry.adapter, entry.adapter.lowrank) for entry in adapters.held]
        try:
            for adapter, lowrank in held:
                adapter.lowrank = replace(lowrank, scale=0.0)
            with adapters.whole.originals():
                yield
        finally:
            for adapter, lowrank in held:
                adapter.lowrank = lowrank

    def _held(self) -> lora.Adapters:
        if self._adapters is None:
            raise UserError("the model has no adapters: the recipe's lora.rank is 0; call hf_weights() for its weights")
        return self._adapters

    def peft_config(self, recipe: Recipe) -> JsonObject:
        """PEFT's adapter_config.json."""
        return lora_files.peft_config_of(self._held(), self.assembly, recipe)

    def for_vllm(self, recipe: Recipe) -> tuple[dict[str, Tensor], JsonObject]:
        """The adapters alone as vLLM loads them, whole on every rank, and their adapter_config.json."""
        adapters = self._held()
        return lora_files.as_vllm(dict(lora_files.gathered(adapters)), adapters, self.assembly, recipe)

    def _stream(self, dtype: torch.dtype | None, bucket: int) -> WeightStream:
        """The plan for the model's own parameters, without those of adapters."""
        if (dtype, bucket) in self._plans:
            return self._plans[dtype, bucket]
        assembly, source = self.assembly, self.assembly.source
        adapters = self._adapters.held if self._adapters is not None else ()
        adapter_ids = {id(parameter) for entry in adapters for parameter in entry.adapter.parameters()}
        parameters = [(name, p) for name, p in model_parameters(self.chunks) if id(p) not in adapter_ids]
        if any(hasattr(parameter, "held") for _, parameter in parameters):
            raise UserError(
                "the model's frozen weights are held in fewer bits (lora.base_dtype=fp8 or nf4), so they can't be published; call "
                "adapter_weights() for what is trained, or take lora.base_dtype=model"
            )
        while source is not None and source.kind == "run":
            source = loading.started_from(source)
        bridge, dims = assembly.family.load("bridge"), build.model_dims(assembly)
        options: JsonObject = {"config": assembly.config.hf, "source": source, "dtype": dtype, "bucket": bucket}
        self._plans[dtype, bucket] = WeightStream(parameters, bridge, dims, self.world.groups, **options)
        return self._plans[dtype, bucket]

    def _merged(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter with its adapter added, as `Adapters.merge` adds it; itself where it has none."""
        for entry in self._adapters.held if self._adapters is not None else ():
            if entry.target.zoo == name:
                return entry.merged()
        return parameter
