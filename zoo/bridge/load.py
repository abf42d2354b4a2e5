"""Import: a Hugging Face folder straight into a model, whatever part of it this rank has.

Every rank maps the files and copies only what it owns, one tensor (or one expert) at a time, so memory stays at the
model plus one tensor. All checks come first, on names and headers: a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.bridge.errors import BridgeError
from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.bridge.mapping.rules import compile_pattern
from zoo.bridge.mapping.table import VOCABULARY, Bridge, Entry, Resolution, is_allowed
from zoo.bridge.mapping.transforms import Dims
from zoo.bridge.native import PASS_THROUGH
from zoo.bridge.parallel import Comm, ShardInfo, cut, default_comm, full_shape, model_parameters, put, together
from zoo.bridge.streams import Folder

type Patterns = tuple[str, ...]
"""zoo's names, or patterns of them."""


def load_hf(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    bridge: Bridge,
    dims: Dims,
    shard: ShardInfo | None = None,
    comm: Comm | None = None,
    moved: Callable[[int, int], None] = lambda done, whole: None,
    *,
    grown_from: int = 0,
) -> Resolution:
    """Copy the tensors of an HF folder into the parameters of this rank's model chunks, cast to their dtype.

    Call it on every rank, before an optimizer takes its copy of the parameters. Returns what was matched. Raises on
    all ranks, before anything is assigned: CheckpointError for a folder that is not whole, BridgeError that lists every
    missing, unmapped, extra, duplicate or misshapen tensor. Known buffers are not read, nor is a tied head that is stored
    all the same (`pass_over`). A reward model's head that the folder has not stays as it is, and is no entry of the result.
    `moved(done, whole)` is called as this rank's bytes reach their place. `grown_from`: as `grow_vocabulary` takes it.
    """
    shard, comm = shard or ShardInfo(), comm or default_comm()
    parameters = together(comm, lambda: model_parameters(model_chunks))
    everywhere = {name for names in comm.gather_objects([name for name, _ in parameters]) for name in names}
    with together(comm, lambda: SafetensorsFolder(folder)) as reader:
        resolution = together(comm, lambda: bridge.resolve(reader.names(), sorted(everywhere), dims))
        together(comm, lambda: grow_vocabulary(reader, resolution, bridge, dims, grown_from))
        parameters = [(name, parameter) for name, parameter in parameters if name in resolution.entries]
        entries = together(comm, lambda: fit_shapes(parameters, resolution, reader, dims, shard))
        together(comm, lambda: pass_over(resolution, reader) if comm.rank == 0 else None)
        together(comm, lambda: _fill_all(parameters, entries, resolution.source, reader, dims, shard, moved))
    return resolution


def grow_vocabulary(
    reader: SafetensorsFolder, resolution: Resolution, bridge: Bridge, dims: Dims, grown_from: int
) -> None:
    """Have embedding and head of `grown_from` rows read as those of `dims.vocabulary`; 0: of a model that has the folder's."""
    if not grown_from:
        return
    for published, actual in resolution.source.items():
        if bridge.zoo_name(published) in VOCABULARY and reader.shape(actual)[:1] == (grown_from,):
            reader.grow(actual, dims.vocabulary)


def fit_shapes(
    parameters: Iterable[tuple[str, Tensor]],
    resolution: Resolution,
    reader: SafetensorsFolder,
    dims: Dims,
    shard: ShardInfo,
) -> dict[str, Entry]:
    """The entries of this rank's parameters, in the layouts that the headers' shapes are of.

    BridgeError lists the tensors whose shapes differ from what the model asks for.
    """
    entries, problems = {}, []
    for name, parameter in parameters:
        if name not in resolution.entries:  # a new head
            continue
        variants = resolution.entries[name].variants(dims)
        zoo_shape = full_shape(parameter.shape, variants[0].rule.shard_for(dims), shard)
        complaints = [_misfits(entry, zoo_shape, resolution.source, reader, dims) for entry in variants]
        fitting = [entry for entry, wrong in zip(variants, complaints, strict=True) if not wrong]
        if fitting:
            entries[name] = fitting[0]
        else:
            problems += complaints[0]
    if problems:
        raise BridgeError(f"{reader.folder}: shapes differ from the model's", problems)
    return entries


def pass_over(resolution: Resolution, reader: SafetensorsFolder, allow: Sequence[str] = ()) -> list[str]:
    """Say on stderr which tensors are not trained, and which hold nothing of their own: known buffers, and a tied model's head.

    BridgeError where a head differs from the embedding that it is tied to, as one of the two would be lost; heads that fit
    a pattern of `allow` are returned as problems instead.
    """
    problems = [
        f"{resolution.source[name]}: differs from {resolution.source[resolution.doubles[name]]}, which the config ties it to"
        for name in unequal(resolution, reader)
    ]
    refused = [problem for problem in problems if not is_allowed(problem, allow)]
    if refused:
        helps = [
            "tie_word_embeddings=false in config.json, where the model has a head of its own; zoo convert with "
            "allow=NAME leaves the head out"
        ]
        raise BridgeError(f"{reader.folder}: a tied model that stores another head", refused, helps)
    if resolution.redundant:
        names = sorted(resolution.source[name] for name in resolution.redundant)
        passed = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        text = f"{reader.folder}: passing over {passed}: equal to what the model makes of its config or ties"
        print(text, file=sys.stderr, flush=True)
    if resolution.passed_through:
        published = [name.removeprefix(PASS_THROUGH) for name in resolution.passed_through]
        parts = ", ".join(sorted({f"{name.partition('.')[0]}.*" for name in published}))
        text = f"{reader.folder}: {len(published):,} tensors are not trained and go into exports as they are: {parts}"
        print(text, file=sys.stderr, flush=True)
    return problems


def unequal(resolution: Resolution, reader: Folder) -> list[str]:
    """Published names of a tied model's stored heads that differ from the embedding they are tied to."""

    def is_equal(name: str, tied: str) -> bool:
        names = resolution.source[name], resolution.source[tied]
        dtypes, shapes = {reader.dtype(each) for each in names}, {reader.shape(each) for each in names}
        return len(dtypes) == len(shapes) == 1 and torch.equal(*map(reader.get, names))

    return [name for name, tied in resolution.doubles.items() if not is_equal(name, tied)]


def _misfits(
    entry: Entry, zoo_shape: Sequence[int], source: Mapping[str, str], reader: SafetensorsFolder, dims: Dims
) -> list[str]:
    """What is wrong with the shapes of a parameter's tensors."""
    if entry.rule.stacked and zoo_shape[0] != entry.rule.experts(dims):
        return [f"{entry.zoo}: {zoo_shape[0]} experts in the model, {entry.rule.experts(dims)} in the config"]
    try:
        wanted = entry.hf_shapes(zoo_shape, dims)
    except ValueError as error:
        return [f"{entry.zoo}: shape {list(zoo_shape)} does not fit {dims} ({error})"]
    return [
        f"{source[name]}: shape {list(reader.shape(source[name]))}, wanted {list(shape)} for {entry.zoo}"
        for name, shape in wanted.items()
        if reader.shape(source[name]) != shape
    ] + [
        f"{name}: holds {reader.dtype(source[name])}, wanted floating-point numbers for {entry.zoo} (is it quantised?)"
        for name in wanted
        if not reader.dtype(source[name]).is_floating_point
    ]


@torch.no_grad()
def _fill_all(
    parameters: Sequence[tuple[str, Tensor]], entries: Mapping[str, Entry], source: Mapping[str, str],
    reader: SafetensorsFolder, dims: Dims, shard: ShardInfo, moved: Callable[[int, int], None],
) -> None:  # fmt: skip
    whole, done = sum(parameter.nbytes for _, parameter in parameters), 0

    def read(names: list[str]) -> list[Tensor]:
        return [reader.get(source[name]) for name in names]

    for name, parameter in parameters:
        moved(done, whole)
        done += parameter.nbytes
        entry = entries[name]
        transform, kind = entry.layout.transform, entry.rule.shard_for(dims)
        if not entry.rule.stacked:
            put(cut(transform.to_zoo(read(entry.hf_names()), dims), kind, shard), parameter)
            continue
        first = shard.ep_rank * parameter.shape[0]
        stacks = [] if entry.layout.per_expert else [source[stack] for stack in entry.hf_names()]
        for local in range(parameter.shape[0]):
            expert = first + local
            parts = [reader.get(stack, expert, expert + 1)[0] for stack in stacks]
            parts = parts or read(entry.hf_names(expert))
            put(cut(transform.to_zoo(parts, dims), kind, shard), parameter, local)


def stored_in_fp32(bridge: Bridge, weights: Path, *, native: bool, tied: bool) -> Patterns:
    """The parameters that a folder's headers say; of a folder that is in fp32 as a whole, those of the family (`Bridge.fp32`).

    Args:
        weights: folder of the safetensors.
        native: they have zoo's names.
        tied: the head is the embedding.
    """
    with SafetensorsFolder(weights) as reader:
        names = {name: [name] for name in reader.names() if not name.startswith(PASS_THROUGH)}
        if not native:
            names = bridge.zoo_names(reader.names())
        dtypes = {name: reader.dtype(name) for name in names}
    wide_ones = {name for name, dtype in dtypes.items() if dtype.is_floating_point and dtype.itemsize >= 4}
    if wide_ones == dtypes.keys():
        return bridge.fp32
    fp32_names = {zoo for name in wide_ones for zoo in names[name]}
    for rule in bridge.rules:
        if tied and rule.tied_to and bridge.zoo_name(rule.tied_to) in fp32_names:
            fp32_names.add(rule.zoo)
    return tuple(sorted(fp32_names))


def fitting_names(patterns: Patterns, names: Iterable[str]) -> set[str]:
    """The names that one of the patterns fits."""
    regexes = [compile_pattern(pattern) for pattern in patterns if "{" in pattern]
    return {name for name in names if name in patterns or any(regex.fullmatch(name) for regex in regexes)}
