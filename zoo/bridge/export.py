"""Export: a sharded model out to a Hugging Face folder in the published layout, ready for from_pretrained.

Every rank that owns a part (one per pipeline stage for dense parameters, one per expert range for experts) writes its
own shards; nothing is gathered beyond one tensor. The names to be written are checked before the first byte, and the
names written before the folder gets its name.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from zoo.bridge import fp8
from zoo.bridge.errors import BridgeError
from zoo.bridge.export_plan import Plan, make_plan
from zoo.bridge.files.side_files import copy_side_files, write_card, write_generation_config
from zoo.bridge.files.writer import DEFAULT_SHARD_BYTES, ExportWriter, Planned, Shard, ShardWriter, disk_errors
from zoo.bridge.load import fit_shapes
from zoo.bridge.mapping.table import Bridge, Entry
from zoo.bridge.mapping.transforms import Dims
from zoo.bridge.parallel import Comm, ShardInfo, default_comm, full_shape, join, model_parameters, shard_axis, together
from zoo.bridge.progress import Progress
from zoo.bridge.streams import Job, Reader, run, to_hf
from zoo.config.locate import Place
from zoo.errors import UserError, size
from zoo.types import JsonMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Saveable(Protocol):
    """A processor of transformers, which writes its files into a folder."""

    def save_pretrained(self, folder: Path, /) -> object: ...


def export_hf(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    bridge: Bridge,
    dims: Dims,
    shard: ShardInfo | None = None,
    comm: Comm | None = None,
    *,
    config: PretrainedConfig | JsonMapping | None = None,
    source: Place | str | Path | None = None,
    source_has_frozen: bool = True,
    processor: Saveable | None = None,
    ends: Sequence[int] = (),
    card: Callable[[JsonMapping], str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool | Literal["aside"] = False,
) -> Path:
    """Write the model as an HF folder; call it on every rank, with `folder` on a file system that all share.

    `config` is an HF config object or dict (default: the source's). From `source`, the weights that training started
    from, come the tensors that zoo does not train and those of frozen parameters, byte for byte (unless not `source_has_frozen`, as an earlier
    run has trained them), and the files of tokenizer and processor; a `processor` (anything with save_pretrained) is written over these. Where there is no
    generation_config.json, one is written, with the tokenizer's end of sequence and `ends`. `card` makes the text of README.md out of
    the export's config.json.
    `dtype` None keeps the source's dtypes, or the model's where there is no source. Returns the folder.

    Raises on all ranks, leaving an existing folder as it was: BridgeError for tensors that do not fit, UserError
    where the folder exists and `overwrite` is false (or it is not zoo's: "aside" moves such a one away), where the source is broken, or where the disk is full.
    """
    shard, comm = shard or ShardInfo(), comm or default_comm()
    parameters = together(comm, lambda: model_parameters(model_chunks))
    held = comm.gather_objects([name for name, _ in parameters])
    everywhere = sorted({name for names in held for name in names})
    still = [name for name, parameter in parameters if source_has_frozen and not parameter.requires_grad]
    frozen = sorted({name for names in comm.gather_objects(still) for name in names})
    stated = dtype or (_most_common(parameters) if source is None else None)
    plan = together(comm, lambda: make_plan(bridge, everywhere, dims, config, source, dtype, stated, frozen))
    together(comm, lambda: check(plan, parameters, dims, shard))
    with ExportWriter(folder, overwrite=overwrite) as writer:
        together(comm, lambda: writer.begin() if comm.rank == 0 else None)
        owned = _by_width(_own(parameters, held), plan)
        written = _write_parameters(owned, plan, dims, shard, comm, writer.partial, shard_bytes)
        written += together(comm, lambda: _write_copies(plan, writer.partial, shard_bytes) if comm.rank == 0 else [])
        written = [s for of_rank in comm.gather_objects(written) for s in of_rank]
        together(comm, lambda: _commit(writer, written, plan, processor, ends, card) if comm.rank == 0 else None)
    return writer.target


@dataclass(frozen=True)
class HeldTensors:
    """Tensors that are exported without a model: what a reader has under zoo's names.

    Attributes:
        reader: gives each tensor of `shapes`, whole.
        shapes: zoo's names, and the shapes that the model has.
        expect: hears of the names in the order in which they will be read.
        frozen: names of tensors that come from `source`, byte for byte where it has them as they are written.
        config: as `export_hf` takes it, and `source` too.
    """

    reader: Reader
    shapes: Mapping[str, tuple[int, ...]]
    bridge: Bridge
    dims: Dims
    config: PretrainedConfig | JsonMapping | None
    source: Place | None
    expect: Callable[[Sequence[str]], None] = lambda names: None
    frozen: Sequence[str] = ()

    def plan(self, dtype: torch.dtype | None = None) -> tuple[Plan, list[tuple[str, Job]]]:
        """What an export of them writes, and how what is written of zoo's tensors, in that order, is made."""
        dims, source, dtypes = self.dims, self.source, self.reader.dtype
        parameters = [
            (name, torch.empty(shape, dtype=dtypes(name), device="meta")) for name, shape in self.shapes.items()
        ]
        stated = dtype or (_most_common(parameters) if source is None else None)
        plan = make_plan(self.bridge, sorted(self.shapes), dims, self.config, source, dtype, stated, self.frozen)
        check(plan, parameters, dims, ShardInfo())
        jobs = [
            (name, job)
            for name, tensor in parameters
            if name not in plan.copied and plan.entries[name].rule.writes(dims)
            for job in to_hf(plan.entries[name], name, self.reader, dims, partial(plan.dtype_of, name, tensor))
        ]
        if plan.fp8 is not None:
            in_fp8 = fp8.in_fp8([job for _, job in jobs], plan.fp8)
            jobs = [(name, job) for (name, _), job in zip(jobs, in_fp8, strict=True)]
        return plan, sorted(jobs, key=lambda pair: -pair[1].planned[0].width)


def export_tensors(
    held: HeldTensors,
    folder: str | Path,
    *,
    processor: Saveable | None = None,
    ends: Sequence[int] = (),
    card: Callable[[JsonMapping], str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool | Literal["aside"] = False,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """As `export_hf`, of tensors that a reader has, by one process that holds a few of them at a time.

    `progress` makes one for so many bytes.
    """
    plan, jobs = held.plan(dtype)
    held.expect(list(dict.fromkeys(name for name, _ in jobs)))
    planned = [tensor for _, job in jobs for tensor in job.planned]
    with ExportWriter(folder, overwrite=overwrite) as writer:
        writer.begin()
        copied = [tensor for job in plan.copies for tensor in job.planned]
        check_room(writer, sum(tensor.nbytes for tensor in (*planned, *copied)))
        counted = progress(sum(tensor.nbytes for tensor in (*planned, *copied))) if progress else None
        wrote = counted or (lambda count: None)
        with ShardWriter(writer.partial, planned, shard_bytes=shard_bytes) as shards:
            run([job for _, job in jobs], shards, wrote)
        written = [*shards.shards, *_write_copies(plan, writer.partial, shard_bytes, wrote)]
        if counted:
            counted.close()
        _commit(writer, written, plan, processor, ends, card)
    return writer.target


def check_room(writer: ExportWriter, nbytes: int) -> None:
    """UserError where the disk of a writer that has begun has not so many bytes left."""
    free = shutil.disk_usage(writer.partial).free
    if nbytes > free:
        raise UserError(
            f"{writer.target}: {size(nbytes)} are to be written and {size(free)} are free on the disk; "
            "make room, or give another folder"
        )


def _most_common(parameters: Sequence[tuple[str, Tensor]]) -> torch.dtype:
    """The dtype that most elements have."""
    counts: Counter[torch.dtype] = Counter()
    for _, parameter in parameters:
        counts[parameter.dtype] += parameter.numel()
    return max(counts, key=counts.__getitem__)


def check(plan: Plan, parameters: Sequence[tuple[str, Tensor]], dims: Dims, shard: ShardInfo) -> None:
    """Compare shapes of this rank's parameters with the table, and with the source where there is one."""
    if plan.source is not None:
        fit_shapes(parameters, plan.source.resolution, plan.source.reader, dims, shard)
    problems = []
    for name, parameter in parameters:
        entry = plan.entries[name]
        zoo_shape = full_shape(parameter.shape, entry.rule.shard_for(dims), shard)
        try:
            entry.hf_shapes(zoo_shape, dims)
        except ValueError as error:
            problems.append(f"{name}: shape {list(zoo_shape)} does not fit {dims} ({error})")
    if problems:
        raise BridgeError("export: shapes", problems)


def _own(parameters: Sequence[tuple[str, Tensor]], held: Sequence[Sequence[str]]) -> list[tuple[str, Tensor]]:
    """The parameters that this rank's pipeline stage writes: not copies of another one's, as of an embedding.

    `held` are the names on each rank; those of one stage are alike. A name is written by the stage of the first rank
    that has it.
    """
    first = {name: rank for rank in reversed(range(len(held))) for name in held[rank]}
    local_names = [name for name, _ in parameters]
    same_stage = [names == local_names for names in held]
    return [(name, parameter) for name, parameter in parameters if same_stage[first[name]]]


def _by_width(parameters: Sequence[tuple[str, Tensor]], plan: Plan) -> list[tuple[str, Tensor, int]]:
    """As a ShardWriter wants them, and alike on all ranks that share them; without those that are copied.

    Each comes with the bytes of an element that is written of it; again for parts of another width.
    """
    left = [pair for pair in parameters if pair[0] not in plan.copied]
    outputs = [(*pair, width) for pair in left for width in plan.widths(*pair)]
    return sorted(outputs, key=lambda output: -output[2])


def _write_parameters(
    parameters: Sequence[tuple[str, Tensor, int]], plan: Plan, dims: Dims, shard: ShardInfo, comm: Comm,
    folder: Path, shard_bytes: int,
) -> list[Shard]:  # fmt: skip
    """Gather and write each parameter; a rank that cannot write still gathers, as the others wait for it."""
    planned = [tensor for output in parameters for tensor in _outputs(*output, plan, dims, shard)]
    shards = ShardWriter(folder, planned, rank=comm.rank, shard_bytes=shard_bytes)
    failure: UserError | None = None
    for name, parameter, width in parameters:
        entry = plan.entries[name]
        if not _takes_part(entry, dims, shard):
            continue
        tensors = _stacked if entry.rule.stacked else _dense
        for hf_name, tensor in tensors(parameter.detach(), entry, dims, shard, comm):
            if failure is None and plan.dtype_of(name, parameter, hf_name).itemsize == width:
                try:
                    shards.write(hf_name, [tensor])
                except UserError as error:
                    failure = error
    shards.close()

    def report() -> list[Shard]:
        if failure is not None:
            raise failure
        return shards.shards

    return together(comm, report)


def _takes_part(entry: Entry, dims: Dims, shard: ShardInfo) -> bool:
    """Whether this rank gathers the tensor with others: one replica of it does."""
    return entry.rule.writes(dims) and (shard.edp_rank if entry.rule.stacked else shard.dp_rank) == 0


def _outputs(name: str, parameter: Tensor, width: int, plan: Plan, dims: Dims, shard: ShardInfo) -> list[Planned]:
    """What of a parameter this rank writes in elements of `width` bytes."""
    entry = plan.entries[name]
    stacked, per_expert = entry.rule.stacked, entry.layout.per_expert
    first = shard.etp_rank == 0 and (per_expert or shard.ep_rank == 0) if stacked else shard.tp_rank == 0
    if not first or not _takes_part(entry, dims, shard):
        return []
    shapes = entry.hf_shapes(full_shape(parameter.shape, entry.rule.shard_for(dims), shard), dims)
    hf_names = list(shapes)
    if per_expert:
        experts = range(shard.ep_rank * len(parameter), (shard.ep_rank + 1) * len(parameter))
        hf_names = [hf_name for expert in experts for hf_name in entry.hf_names(expert)]
    planned = [Planned(hf_name, shapes[hf_name], plan.dtype_of(name, parameter, hf_name)) for hf_name in hf_names]
    return [tensor for tensor in planned if tensor.dtype.itemsize == width]


def _write_copies(
    plan: Plan, folder: Path, shard_bytes: int, wrote: Callable[[int], None] = lambda count: None
) -> list[Shard]:
    """On rank 0: what comes from the source; `wrote` hears of the bytes of each piece."""
    planned = [tensor for job in plan.copies for tensor in job.planned]
    with ShardWriter(folder, planned, shard_bytes=shard_bytes, label="source") as shards:
        run(plan.copies, shards, wrote)
    return shards.shards


def _dense(local: Tensor, entry: Entry, dims: Dims, shard: ShardInfo, comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of a parameter, on TP rank 0; all ranks of the TP group must ask."""
    sharded = entry.rule.shard is not None and shard.tp_size > 1
    pieces = comm.gather(local, "tp") if sharded else [local]
    if shard.tp_rank == 0:
        full = join(pieces, entry.rule.shard_for(dims))
        yield from zip(entry.hf_names(), entry.layout.transform.to_hf(full, dims), strict=True)


def _stacked(local: Tensor, entry: Entry, dims: Dims, shard: ShardInfo, comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of this rank's experts, on ETP rank 0 (of a fused layout: of all experts, on EP rank 0 too)."""
    kind = entry.rule.shard_for(dims)
    axis = shard_axis(kind)
    fused = not entry.layout.per_expert
    if fused and shard.ep_size > 1:
        local = torch.cat(comm.gather(local, "ep"))
    pieces = comm.gather(local, axis) if shard.etp_size > 1 else [local]
    if shard.etp_rank != 0 or (fused and shard.ep_rank != 0):
        return
    first = 0 if fused else shard.ep_rank * local.shape[0]
    experts = (join([piece[i] for piece in pieces], kind) for i in range(local.shape[0]))
    parts = (entry.layout.transform.to_hf(expert, dims) for expert in experts)
    if fused:
        yield from zip(entry.hf_names(), (torch.stack(part) for part in zip(*parts, strict=True)), strict=True)
        return
    for expert, tensors in enumerate(parts, start=first):
        yield from zip(entry.hf_names(expert), tensors, strict=True)


def _commit(
    writer: ExportWriter, shards: list[Shard], plan: Plan, processor: Saveable | None, ends: Sequence[int],
    card: Callable[[JsonMapping], str] | None,
) -> None:  # fmt: skip
    """On rank 0: check what was written, add the files beside the weights, and give the folder its name."""
    copied = [tensor.name for job in plan.copies for tensor in job.planned]
    expected = Counter({*plan.names, *copied})
    written = Counter(name for shard in shards for name in shard.tensors)
    problems = [f"{name}: not written by any rank" for name in (expected - written)]
    problems += [f"{name}: written more than once, or not asked for" for name in (written - expected)]
    if problems:
        raise BridgeError(f"{writer.target}: the export is not whole", problems)
    with disk_errors(writer.partial):
        if plan.source is not None:
            copy_side_files(plan.source.files, writer.partial, plan.source.bridge.carry_files)
        if processor is not None:
            processor.save_pretrained(writer.partial)
        (writer.partial / "config.json").write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n")
        write_generation_config(writer.partial, plan.config, ends)
        if card is not None:
            write_card(writer.partial, writer.target, card(plan.config))
        writer.commit(shards)
