"""Import: a Hugging Face folder straight into a model, whatever part of it this rank has.

Every rank maps the files and copies only what it owns, one tensor (or one expert) at a time, so memory stays at the
model plus one tensor. All checks come first, on names and headers: a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.bridge.errors import BridgeError
from zoo.bridge.mapping import Bridge, Resolution
from zoo.bridge.parallel import Comm, ShardInfo, cut, default_comm, full_shape, model_parameters, together
from zoo.bridge.safetensors_io import SafetensorsFolder
from zoo.bridge.transforms import Dims


def load_hf(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    bridge: Bridge,
    dims: Dims,
    shard: ShardInfo | None = None,
    comm: Comm | None = None,
) -> Resolution:
    """Copy the tensors of an HF folder into the parameters of this rank's model chunks, cast to their dtype.

    Call it on every rank, before an optimizer takes its copy of the parameters. Returns what was matched. Raises on
    all ranks, before anything is assigned: CheckpointError for a folder that is not whole, BridgeError that lists every
    missing, unmapped, extra, duplicate or misshapen tensor.
    """
    shard, comm = shard or ShardInfo(), comm or default_comm()
    parameters = together(comm, lambda: model_parameters(model_chunks))
    everywhere = {name for names in comm.gather_objects([name for name, _ in parameters]) for name in names}
    with together(comm, lambda: SafetensorsFolder(folder)) as reader:
        resolution = together(comm, lambda: bridge.resolve(reader.names(), sorted(everywhere), dims))
        together(comm, lambda: check_shapes(parameters, resolution, reader, dims, shard))
        together(comm, lambda: _fill_all(parameters, resolution, reader, dims, shard))
    return resolution


def check_shapes(
    parameters: Iterable[tuple[str, Tensor]],
    resolution: Resolution,
    reader: SafetensorsFolder,
    dims: Dims,
    shard: ShardInfo,
) -> None:
    """Compare the headers with the shapes that this rank's parameters ask for; BridgeError lists the differences."""
    problems = []
    for name, parameter in parameters:
        entry = resolution.entries[name]
        zoo_shape = full_shape(parameter.shape, entry.rule.shard_for(dims), shard)
        try:
            wanted = entry.hf_shapes(zoo_shape, dims)
        except ValueError as error:
            problems.append(f"{name}: shape {list(zoo_shape)} does not fit {dims} ({error})")
            continue
        if entry.rule.stacked and zoo_shape[0] != dims.experts:
            problems.append(f"{name}: {zoo_shape[0]} experts in the model, {dims.experts} in the config")
            continue
        for hf_name, shape in wanted.items():
            actual = resolution.source[hf_name]
            if reader.shape(actual) != shape:
                problems.append(
                    f"{actual}: shape {list(reader.shape(actual))}, wanted {list(shape)} for {name}"
                )
    if problems:
        raise BridgeError(f"{reader.folder}: shapes differ from the model's", problems)


@torch.no_grad()
def _fill_all(
    parameters: Iterable[tuple[str, Tensor]],
    resolution: Resolution,
    reader: SafetensorsFolder,
    dims: Dims,
    shard: ShardInfo,
) -> None:
    def read(names: list[str]) -> list[Tensor]:
        return [reader.get(resolution.source[name]) for name in names]

    for name, parameter in parameters:
        entry = resolution.entries[name]
        transform, kind = entry.layout.transform, entry.rule.shard_for(dims)
        if not entry.rule.stacked:
            parameter.copy_(cut(transform.to_zoo(read(entry.hf_names()), dims), kind, shard))
            continue
        first = shard.ep_rank * parameter.shape[0]
        stacks = [] if entry.layout.per_expert else read(entry.hf_names())
        for local in range(parameter.shape[0]):
            expert = first + local
            parts = [stack[expert] for stack in stacks] or read(entry.hf_names(expert))
            parameter[local].copy_(cut(transform.to_zoo(parts, dims), kind, shard))
