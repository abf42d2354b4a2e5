"""Export: a sharded model out to a Hugging Face folder in the published layout, ready for from_pretrained.

Every rank that owns a part (one per pipeline stage for dense parameters, one per expert range for experts) writes its
own shards; nothing is gathered beyond one tensor. The names to be written are checked before the first byte, and the
names written before the folder gets its name.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bridge.errors import BridgeError
from zoo.bridge.export_writer import DEFAULT_SHARD_BYTES, ExportWriter, Shard, ShardWriter, disk_errors
from zoo.bridge.load import fit_shapes
from zoo.bridge.mapping import Bridge, Entry, Resolution
from zoo.bridge.parallel import (
    Comm,
    ShardInfo,
    default_comm,
    full_shape,
    join,
    model_parameters,
    shard_axis,
    together,
)
from zoo.bridge.safetensors_io import SafetensorsFolder
from zoo.bridge.transforms import Dims
from zoo.errors import UserError

# Beside the weights: tokenizer, processor, chat template, generation config. No pickles, no code, no model card.
_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = ("config.json",)  # written from the config


@dataclass(frozen=True)
class _Plan:
    """What one export writes: entries of all ranks, their published names, and the source's part."""

    entries: Mapping[str, Entry]
    names: Sequence[str]
    config: dict[str, Any]
    reader: SafetensorsFolder | None
    resolution: Resolution | None

    def dtype_of(self, zoo_name: str) -> torch.dtype | None:
        """The dtype the tensor has in the source."""
        if self.reader is None or self.resolution is None:
            return None
        entry = self.resolution.entries[zoo_name]
        return self.reader.dtype(self.resolution.source[entry.hf_names(0)[0]])


def export_hf(
    model_chunks: Sequence[nn.Module],
    folder: str | Path,
    bridge: Bridge,
    dims: Dims,
    shard: ShardInfo | None = None,
    comm: Comm | None = None,
    *,
    config: Any = None,
    source: str | Path | None = None,
    processor: Any = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write the model as an HF folder; call it on every rank, with `folder` on a file system that all share.

    `config` is an HF config object or dict (default: the source's). From `source`, the HF folder that training started
    from, come the tensors that zoo does not train, byte for byte, and the files of tokenizer and processor; a
    `processor` (anything with save_pretrained) is written over these. `dtype` None keeps the source's dtypes, or the
    model's where there is no source. Returns the folder.

    Raises on all ranks, leaving an existing folder as it was: BridgeError for tensors that do not fit, UserError
    where the folder exists and `overwrite` is false, where the source is broken, or where the disk is full.
    """
    shard, comm = shard or ShardInfo(), comm or default_comm()
    writer = ExportWriter(folder, overwrite=overwrite)
    parameters = together(comm, lambda: model_parameters(model_chunks))
    held = comm.gather_objects([name for name, _ in parameters])
    everywhere = sorted({name for names in held for name in names})
    stored = dtype or (parameters[0][1].dtype if source is None else None)
    plan = together(comm, lambda: _plan(bridge, everywhere, dims, config, source, stored))
    together(comm, lambda: _check(plan, parameters, dims, shard))
    together(comm, lambda: writer.begin() if comm.rank == 0 else None)
    try:
        shards = ShardWriter(writer.partial, rank=comm.rank, shard_bytes=shard_bytes)
        mine = _own(parameters, held)
        failure = _write_parameters(mine, plan, dims, shard, comm, shards, dtype)
        together(comm, lambda: _finish_shards(shards, failure, plan, comm.rank))
        written = [s for of_rank in comm.gather_objects(shards.shards) for s in of_rank]
        together(comm, lambda: _commit(writer, written, plan, processor) if comm.rank == 0 else None)
    except BaseException:
        if comm.rank == 0:
            writer.discard()
        raise
    return writer.target


def _plan(
    bridge: Bridge,
    zoo_names: Sequence[str],
    dims: Dims,
    config: Any,
    source: str | Path | None,
    dtype: torch.dtype | None,
) -> _Plan:
    """Pair names with rules and with the source; nothing is written yet."""
    entries = bridge.publish(zoo_names)
    names = bridge.published_names(entries.values(), dims)
    reader = None if source is None else SafetensorsFolder(source)
    resolution = None if reader is None else bridge.resolve(reader.names(), zoo_names, dims)
    carried = list(resolution.carried) if resolution else []
    plain = _plain_config(config, source)
    if bridge.export_config is not None:
        plain = bridge.export_config(plain, [*names, *carried])
    if dtype is not None:
        plain = {
            **_with_dtype(plain, str(dtype).removeprefix("torch.")),
            "dtype": str(dtype).removeprefix("torch."),
        }
    return _Plan(entries, names, plain, reader, resolution)


def _plain_config(config: Any, source: str | Path | None) -> dict[str, Any]:
    """The config as a dict, as save_pretrained would write it."""
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None:
        return json.loads(config.to_json_string())
    if source is None:
        raise UserError("export: no config given, and no source folder to take it from")
    path = Path(source) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the export a config")
    return json.loads(path.read_text())


def _with_dtype(value: Any, dtype: str) -> Any:
    """The config with `dtype` wherever it, or a part of it, states one."""
    if not isinstance(value, dict):
        return value
    return {k: dtype if k in ("dtype", "torch_dtype") else _with_dtype(v, dtype) for k, v in value.items()}


def _check(plan: _Plan, parameters: Sequence[tuple[str, Tensor]], dims: Dims, shard: ShardInfo) -> None:
    """Shapes of this rank's parameters against the table, and against the source where there is one."""
    if plan.reader is not None and plan.resolution is not None:
        fit_shapes(parameters, plan.resolution, plan.reader, dims, shard)
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
    mine = [name for name, _ in parameters]
    same_stage = [names == mine for names in held]
    return [(name, parameter) for name, parameter in parameters if same_stage[first[name]]]


def _write_parameters(
    parameters: Sequence[tuple[str, Tensor]],
    plan: _Plan,
    dims: Dims,
    shard: ShardInfo,
    comm: Comm,
    shards: ShardWriter,
    dtype: torch.dtype | None,
) -> UserError | None:
    """Gather and write each parameter; a rank that cannot write goes on gathering, as the others wait for it."""
    failure = None
    for name, parameter in parameters:
        entry = plan.entries[name]
        if not entry.rule.writes(dims) or (shard.edp_rank if entry.rule.stacked else shard.dp_rank) != 0:
            continue
        tensors = _stacked if entry.rule.stacked else _dense
        for hf_name, tensor in tensors(parameter.detach(), entry, dims, shard, comm):
            if failure is None:
                try:
                    shards.add(hf_name, tensor, dtype or plan.dtype_of(name))
                except UserError as error:
                    failure = error
    return failure


def _dense(
    local: Tensor, entry: Entry, dims: Dims, shard: ShardInfo, comm: Comm
) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of a parameter, on TP rank 0; all ranks of the TP group must ask."""
    sharded = entry.rule.shard is not None and shard.tp_size > 1
    pieces = comm.gather(local, "tp") if sharded else [local]
    if shard.tp_rank == 0:
        full = join(pieces, entry.rule.shard_for(dims))
        yield from zip(entry.hf_names(), entry.layout.transform.to_hf(full, dims), strict=True)


def _stacked(
    local: Tensor, entry: Entry, dims: Dims, shard: ShardInfo, comm: Comm
) -> Iterator[tuple[str, Tensor]]:
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
        yield from zip(
            entry.hf_names(), (torch.stack(part) for part in zip(*parts, strict=True)), strict=True
        )
        return
    for expert, tensors in enumerate(parts, start=first):
        yield from zip(entry.hf_names(expert), tensors, strict=True)


def _finish_shards(shards: ShardWriter, failure: UserError | None, plan: _Plan, rank: int) -> None:
    """Flush, after rank 0 has added the carried tensors."""
    if failure is not None:
        raise failure
    if rank == 0 and plan.reader is not None and plan.resolution is not None:
        for name in plan.resolution.carried:
            shards.add(name, plan.reader.get(name))
    shards.flush()


def _commit(writer: ExportWriter, shards: list[Shard], plan: _Plan, processor: Any) -> None:
    """On rank 0: check what was written, add the files beside the weights, and give the folder its name."""
    carried = list(plan.resolution.carried) if plan.resolution else []
    expected = Counter([*plan.names, *carried])
    written = Counter(name for shard in shards for name in shard.tensors)
    problems = [f"{name}: not written by any rank" for name in (expected - written)]
    problems += [f"{name}: written more than once, or not asked for" for name in (written - expected)]
    if problems:
        raise BridgeError(f"{writer.target}: the export is not whole", problems)
    with disk_errors(writer.partial):
        if plan.reader is not None:
            _copy_side_files(plan.reader.folder, writer.partial)
        if processor is not None:
            processor.save_pretrained(writer.partial)
        (writer.partial / "config.json").write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n")
        writer.commit(shards)


def _copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, processor, chat templates and generation config, as they are."""
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name == "additional_chat_templates":
                shutil.copytree(path, target / path.name)
        elif path.suffix in _SIDE_SUFFIXES and path.name not in _NOT_COPIED:
            if not path.name.endswith(".index.json") and not path.name.startswith("."):
                shutil.copyfile(path, target / path.name)
        elif path.name.upper().startswith("LICENSE"):
            shutil.copyfile(path, target / path.name)
