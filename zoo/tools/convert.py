"""Checkpoints from Hugging Face to zoo and back, without a model in memory; `zoo.convert`.

Everything that headers say is checked before the first byte: every tensor has a partner, shapes fit, the disk has room.
Tensors then go from file to file a piece at a time, into a folder that gets its name when it is whole and the source's sums
have proved right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import torch

from zoo.bridge import ExportWriter, SafetensorsFolder, ShardInfo, ShardWriter, fp8
from zoo.bridge.export import check_room
from zoo.bridge.export_plan import with_dtype
from zoo.bridge.files.record import ChecksumsWhileReading
from zoo.bridge.files.side_files import CARD, copy_side_files, write_card, write_generation_config
from zoo.bridge.files.writer import DEFAULT_SHARD_BYTES, DTYPE_NAMES, disk_errors
from zoo.bridge.load import fit_shapes, pass_over
from zoo.bridge.mapping.served import AdapterFormat
from zoo.bridge.native import (
    FORMAT,
    PASS_THROUGH,
    in_layouts,
    layouts_of,
    native,
    published_dtypes,
    read_about,
    read_layouts,
)
from zoo.bridge.progress import Progress
from zoo.bridge.streams import Job, by_width, copy_job, run, to_hf, to_zoo
from zoo.checkpoint import model_card as card
from zoo.checkpoint.export import export_folder, export_run
from zoo.checkpoint.run_adapters import export_run_adapters
from zoo.checkpoint.selection import check_beside_weights
from zoo.config.hub import check_push, push
from zoo.config.locate import (
    ABOUT,
    HF_PART,
    WEIGHTS_PART,
    Place,
    check_side_files,
    locate,
    quantisation,
    read_arch,
    side_file_fault,
    unquantised,
)
from zoo.errors import ConfigError, UserError
from zoo.files import expanded, size_in_bytes
from zoo.logging.result import Model, run_of
from zoo.model.meta_model import MetaModel, build_meta_model, family_of, published_names
from zoo.parallel.process_state import preserve_process_state
from zoo.registry import families
from zoo.types import JsonObject

CONVERSION = "zoo_conversion.json"  # beside an exported folder's weights: what it was allowed to leave out


@dataclass(frozen=True)
class Conversion:
    """The plan of a conversion: the tensors and files that will be written."""

    jobs: list[Job]
    allowed: Sequence[str]  # problems that `allow` let pass
    part: str = ""  # folder of the weights in the target
    write_side_files: Callable[[Path], None] = lambda folder: None  # writes what else belongs into the target
    layouts: Mapping[str, str] = field(default_factory=dict)  # `zoo.bridge.native.layouts_of` what is read
    check_source: Callable[[], None] = lambda: None  # raises where the source is damaged; called at the end
    card: str | None = None  # text of its README.md
    # Dtypes of published tensors that share a tensor of zoo's with wider ones.
    dtypes: Mapping[str, str] = field(default_factory=dict)


@preserve_process_state()
def convert(
    source: Model,
    target: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_BYTES,
    allow: Sequence[str] | str = (),
    revision: str | None = None,
    overwrite: bool | str = False,
    push_to: str | None = None,
    private: bool | str = True,
    adapter_format: str | None = None,
    quiet: bool = False,
) -> Path:
    """Convert a checkpoint; the direction follows from what `source` is. `zoo convert` hands its values over as they are.

    A Hugging Face folder or hub id becomes zoo's own weights (:mod:`zoo.bridge.native`); those, or a checkpoint or the
    folder of a training run, become a Hugging Face folder that `from_pretrained` loads. With dtype fp8 any of them becomes a Hugging Face
    folder in block-scaled FP8, as the model's -FP8 folders are published.

    Args:
        source: what to convert; what names a run, too: its `TrainResult`, recipe, or recipe's name or file.
        target: the folder to write; it appears when it is whole.
        dtype: dtype of the tensors that zoo trains, torch's or a name (bf16, fp16, fp32, fp8); None keeps the source's. Tensors that zoo does
            not train keep their bytes.
        max_shard_size: largest size of a weights file, in bytes or as "5GB"; a larger tensor has a file of its own.
        allow: patterns (`talker.*`) of tensors that may be missing, unmapped or extra, in a list or with commas between them; recorded
            in the output.
        revision: branch, tag or commit of a hub id.
        overwrite: replace an existing target, if zoo has written it and nothing was put into it since; a bool, or "true" or "false".
        push_to: hub repository that the Hugging Face folder is uploaded to; made, if need be, before anything is converted.
        private: whether a new repository is private; one that is public is then refused.
        adapter_format: write a run's adapters alone, in this format: "peft", or "vllm", which peft loads too; None merges them.
        quiet: no progress on stderr.

    Returns:
        The target.

    Raises:
        BridgeError: tensors that do not fit, all in one report; nothing is written.
        CheckpointError: the source is damaged; there is no target.
        UserError: `source` does not exist, `target` exists already, the disk has no room, or a value is none of its kind.
    """
    dtype, shard_bytes = float_dtype(dtype), size_in_bytes(max_shard_size, "max_shard_size")
    overwrite, private = _flag("overwrite", overwrite), _flag("private", private)
    allow = [pattern for pattern in allow.split(",") if pattern] if isinstance(allow, str) else allow
    source = run_of(source)
    origin = locate(source, revision)
    check_beside_weights(origin)
    if origin.kind != "run":  # whose files have checksums
        check_side_files(origin.files)
        if (fault := side_file_fault(origin.files)) is not None:
            raise ConfigError(fault)
    target = expanded(target)
    written_as = None if adapter_format is None else _adapter_format(adapter_format, origin, source, dtype)
    if dtype == fp8.DTYPE:
        _check_fp8(origin)
    elif push_to and origin.kind == "hf":
        raise UserError(f"push_to={push_to}: only a Hugging Face folder is pushed, and {source} would become zoo's")
    if push_to:
        check_push(push_to, "push_to", private=private)
    writer = ExportWriter(target, overwrite=overwrite)
    if origin.kind == "run" and allow:
        raise UserError("allow: a run's checkpoint is whole, or it is not loaded; leave it out")
    if written_as is not None:
        export_run_adapters(origin, target, written_as, dtype=dtype, overwrite=overwrite)
    elif origin.kind == "run":
        export_run(origin, target, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite, quiet=quiet)
    elif origin.kind == "hf" and dtype == fp8.DTYPE:
        if allow:
            raise UserError(
                "allow with dtype=fp8: convert the folder to zoo's own weights with allow=, and those to FP8"
            )
        export_folder(origin, target, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite, quiet=quiet)
    elif origin.kind == "zoo":
        checksums = ChecksumsWhileReading(origin.folder)
        with ExitStack() as opened:
            with checksums.raise_damage_first():
                reader = opened.enter_context(SafetensorsFolder(origin.weights, on_read=checksums.read))
                conversion = _plan_hf(origin, reader, dtype, allow)
            _write(replace(conversion, check_source=checksums.finish), writer, shard_bytes, quiet)
    else:
        with SafetensorsFolder(origin.weights) as reader:
            conversion = _plan_zoo(origin, card.name_of(origin, str(source)), reader, dtype, allow)
            _write(conversion, writer, shard_bytes, quiet)
    if push_to:
        push(target, push_to, "push_to", private=private)
    return target


def _flag(key: str, value: bool | str) -> bool:
    """A bool, or "true" or "false"; raises UserError for any other."""
    text = str(value).lower()
    if text not in ("true", "false"):
        raise UserError(f"{key}={value}: wanted true or false")
    return text == "true"


def _check_fp8(origin: Place) -> None:
    """UserError where no FP8 folder of such a model is published, or the source is one."""
    arch = read_arch(origin.files)
    if quantisation(arch):
        raise UserError(
            f"dtype=fp8: {origin.folder} is quantised already; convert the weights in bf16 that it was made of"
        )
    if family_of(arch).load("bridge").fp8 is None:
        published = ", ".join(name for name, family in families().items() if family.load("bridge").fp8 is not None)
        raise UserError(
            f"dtype=fp8: model_type {arch['model_type']} is not published in FP8, so no server is known to load what zoo would write; "
            f"it is written of {published}; write dtype=bf16, and let the server quantise (vllm serve --quantization)"
        )


def _adapter_format(text: str, origin: Place, source: Model, dtype: torch.dtype | None) -> AdapterFormat:
    """The format of that name; UserError where there is none, or where it has no meaning."""
    if text not in get_args(AdapterFormat.__value__):
        raise UserError(f"adapter_format={text}: wanted one of {', '.join(get_args(AdapterFormat.__value__))}")
    if origin.kind != "run":
        raise UserError(f"adapter_format={text}: {source} is no run with adapters; leave it out")
    if dtype == fp8.DTYPE:
        raise UserError(f"dtype=fp8: adapters are in bf16, fp16 or fp32; leave it or adapter_format={text} out")
    return cast("AdapterFormat", text)


def float_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """bf16, fp16, fp32 or fp8, by that name or torch's; None stays. Raises UserError for any other."""
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": fp8.DTYPE}
    by_name = known | {str(candidate).removeprefix("torch."): candidate for candidate in known.values()}
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in by_name:
        raise UserError(f"dtype={dtype}: wanted one of {', '.join(known)}")
    return by_name.get(name)


def _plan_zoo(
    origin: Place, name: str, reader: SafetensorsFolder, dtype: torch.dtype | None, allow: Sequence[str]
) -> Conversion:
    """A Hugging Face folder as zoo's own weights; `name` is what they will call it."""
    arch = read_arch(origin.files)
    plan = build_meta_model(arch, reader.names())
    conversion = to_zoo_jobs(reader, plan, dtype, allow)
    changed = _changes(arch, dtype, conversion.allowed)
    about = {
        "format": FORMAT, "family": plan.family.name, "source": name, "dtypes": dict(conversion.dtypes),
        "allow": list(allow), "allowed": list(conversion.allowed), "layouts": dict(conversion.layouts), "changed": changed,
    }  # fmt: skip

    def write_side_files(folder: Path) -> None:
        (folder / HF_PART).mkdir()
        copy_side_files(origin.files, folder / HF_PART, plan.bridge.carry_files)
        if (origin.files / CARD).is_file():
            shutil.copyfile(origin.files / CARD, folder / HF_PART / CARD)
        plain = unquantised(arch)
        _write_json(folder / HF_PART / "config.json", plain if dtype is None else with_dtype(plain, dtype))
        _write_json(folder / ABOUT, about)

    text = card.converted(origin, arch, changed, native=True)
    return replace(conversion, part=WEIGHTS_PART, write_side_files=write_side_files, card=text)


def _changes(arch: JsonObject, dtype: torch.dtype | None, allowed: Sequence[str]) -> dict[str, str]:
    """What a conversion makes otherwise than it finds it, for the model card; empty where the same weights come out."""
    changes = {"dequantised": "block-scaled FP8 to bf16"} if quantisation(arch) else {}
    if dtype == fp8.DTYPE:
        changes["quantised"] = fp8.KIND
    elif dtype is not None:
        changes["cast to"] = str(dtype).removeprefix("torch.")
    if allowed:
        changes["left out"] = f"{len(allowed)} tensors, as `allow` let pass"
    return changes


def _plan_hf(origin: Place, reader: SafetensorsFolder, dtype: torch.dtype | None, allow: Sequence[str]) -> Conversion:
    """zoo's own weights as a Hugging Face folder."""
    about, arch = read_about(origin.folder), read_arch(origin.files)
    plan = build_meta_model(arch, published_names(reader, arch))
    conversion = to_hf_jobs(origin.folder, reader, plan, dtype, allow)
    config, names = arch, [tensor.name for job in conversion.jobs for tensor in job.planned]
    if plan.bridge.export_config is not None:
        config = plan.bridge.export_config(config, names)
    if dtype == fp8.DTYPE:
        config = fp8.quantised_config(with_dtype(config, fp8.OTHERS), plan.bridge, names)
    elif dtype is not None:
        config = with_dtype(config, dtype)
    allowed = [*about.get("allowed", ()), *conversion.allowed]
    before = about.get("changed")
    changed = {**(before if isinstance(before, dict) else {}), **_changes(arch, dtype, conversion.allowed)}

    def write_side_files(folder: Path) -> None:
        copy_side_files(origin.files, folder, plan.bridge.carry_files)
        _write_json(folder / "config.json", config)
        write_generation_config(folder, config)
        if allowed:
            patterns = [*about.get("allow", ()), *allow]
            _write_json(folder / CONVERSION, {"allow": patterns, "allowed": allowed})

    published = origin.files / CARD  # of the same weights, so it is true of these
    if published.is_file() and not changed:
        text = published.read_text(encoding="utf-8", errors="replace")
    else:
        text = card.converted(origin, config, changed)
    return replace(conversion, write_side_files=write_side_files, card=text)


def to_zoo_jobs(
    reader: SafetensorsFolder, plan: MetaModel, dtype: torch.dtype | None, allow: Sequence[str] = ()
) -> Conversion:
    """How each tensor of a Hugging Face folder becomes one of zoo's own weights."""
    resolution = plan.bridge.resolve(reader.names(), plan.parameters, plan.dims, allow)
    allowed = [*resolution.allowed, *pass_over(resolution, reader, allow)]
    parameters = [(name, plan.parameters[name]) for name in resolution.entries]
    entries = fit_shapes(parameters, resolution, reader, plan.dims, ShardInfo())
    jobs = [
        to_zoo(entries[name], tuple(parameter.shape), resolution.source, reader, plan.dims, dtype)
        for name, parameter in parameters
        if not (plan.dims.tied and entries[name].rule.tied_to)
    ]
    names = {actual: published for published, actual in resolution.source.items()}
    dtypes = {
        published: DTYPE_NAMES[stored]
        for job in jobs
        for entry in [entries[job.planned[0].name]]
        for published in entry.all_names(plan.dims)
        if (stored := reader.dtype(resolution.source[published])) != job.planned[0].dtype and dtype is None
    }
    jobs += [copy_job(actual, reader, names[actual], to_zoo=True) for actual in resolution.passed_through]
    return Conversion(by_width(jobs), allowed, layouts=layouts_of(entries.values()), dtypes=dtypes)


def to_hf_jobs(
    folder: Path, reader: SafetensorsFolder, plan: MetaModel, dtype: torch.dtype | None, allow: Sequence[str] = ()
) -> Conversion:
    """How each of zoo's own tensors in a folder becomes the published ones, in the layouts and dtypes that the folder records."""
    dtypes = published_dtypes(folder)
    resolution = native(plan.bridge).resolve(reader.names(), plan.parameters, plan.dims, allow)
    parameters = [(name, plan.parameters[name]) for name in resolution.entries]
    fit_shapes(parameters, resolution, reader, plan.dims, ShardInfo())
    published = in_layouts(plan.bridge.publish(resolution.entries), read_layouts(folder), folder)
    matrices = plan.bridge.fp8 if dtype == fp8.DTYPE else None
    if matrices is not None:
        dtype, published = fp8.OTHERS, {name: entry.in_fp8(matrices) for name, entry in published.items()}
    plan.bridge.published_names(published.values(), plan.dims)

    def written(name: str, part: str) -> torch.dtype:
        return dtype or dtypes.get(part, reader.dtype(name))

    jobs = [
        job
        for name, entry in published.items()
        if entry.rule.writes(plan.dims)
        for job in to_hf(entry, name, reader, plan.dims, partial(written, name))
    ]
    jobs += [
        copy_job(name, reader, name.removeprefix(PASS_THROUGH), to_zoo=False) for name in resolution.passed_through
    ]
    return Conversion(by_width(jobs if matrices is None else fp8.in_fp8(jobs, matrices)), resolution.allowed)


def _write(conversion: Conversion, writer: ExportWriter, shard_bytes: int, quiet: bool) -> None:
    """The folder, whole or not at all."""
    try:
        writer.begin()
        planned = [tensor for job in conversion.jobs for tensor in job.planned]
        nbytes = sum(tensor.nbytes for tensor in planned)
        check_room(writer, nbytes)
        progress = Progress(f"writing {writer.target.name}", nbytes)
        checksums = conversion.part == WEIGHTS_PART
        shards = ShardWriter(writer.partial, planned, shard_bytes=shard_bytes, checksums=checksums)
        try:
            run(conversion.jobs, shards, (lambda count: None) if quiet else progress)
        finally:
            shards.close()
        conversion.check_source()
        with disk_errors(writer.partial):
            conversion.write_side_files(writer.partial)
            if conversion.card is not None:
                write_card(writer.partial, writer.target, conversion.card)
            writer.commit(shards.shards, conversion.part)
    except BaseException:
        writer.discard()
        raise
    if not quiet:
        progress.close()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
