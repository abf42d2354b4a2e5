"""What an export writes, decided before the first byte: names, config, and what is copied from the source's weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bridge import fp8
from zoo.bridge.errors import BridgeError
from zoo.bridge.files.quantised import SCALE
from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.bridge.load import grow_vocabulary
from zoo.bridge.mapping.rules import PublishedFP8
from zoo.bridge.mapping.table import SCORE, Bridge, Entry, Resolution
from zoo.bridge.mapping.transforms import Dims
from zoo.bridge.native import PASS_THROUGH, in_layouts, native, published_dtypes, read_layouts
from zoo.bridge.streams import Job, by_width, copy_job, to_hf
from zoo.config.locate import Place, locate, unquantised
from zoo.errors import UserError
from zoo.files import read_object
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_TOKENS = re.compile("ForConditionalGeneration|ForCausalLM")  # what classes of language models end in


@dataclass(frozen=True)
class Source:
    """What training started from: its tensors, under Hugging Face's names or zoo's, and the files beside them."""

    files: Path
    reader: SafetensorsFolder
    resolution: Resolution
    bridge: Bridge
    dims: Dims
    folder: Path
    layouts: Mapping[str, str] = field(default_factory=dict)  # what zoo's own weights record of them
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of published tensors, where zoo's has another

    @classmethod
    def open(
        cls, source: Place | str | Path | None, bridge: Bridge, zoo_names: Sequence[str], dims: Dims
    ) -> Source | None:
        if source is None:
            return None
        origin = source if isinstance(source, Place) else locate(str(source))
        if origin.kind == "run":
            raise UserError(f"{origin.folder}: tensors can't be carried over from a run's checkpoint")
        is_zoo = origin.kind == "zoo"
        table, layouts = (native(bridge), read_layouts(origin.folder)) if is_zoo else (bridge, {})
        reader = SafetensorsFolder(origin.weights)
        dtypes = published_dtypes(origin.folder) if is_zoo else {}
        resolution = table.resolve(reader.names(), zoo_names, dims)
        grow_vocabulary(reader, resolution, table, dims, origin.grown_from)
        return cls(origin.files, reader, resolution, bridge, dims, origin.folder, layouts, dtypes)

    def dtype_of(self, zoo_name: str, published: str = "") -> torch.dtype:
        """The dtype that a tensor has, or the `published` one that is a part of it."""
        if published in self.dtypes:
            return self.dtypes[published]
        entry = self.resolution.entries.get(zoo_name)
        if entry is not None and published in self.resolution.source:
            return self.reader.dtype(self.resolution.source[published])
        if entry is None:  # a new head, in the dtype of the others
            entry = next(iter(self.resolution.entries.values()))
        return self.reader.dtype(self.resolution.source[entry.hf_names(0)[0]])

    def _to_hf(self, entry: Entry, name: str) -> list[Job]:
        """The published tensors of one that stands here under zoo's name, as `name`."""
        return to_hf(entry, name, self.reader, self.dims, lambda part: self.dtypes.get(part, self.reader.dtype(name)))

    def copies(self, frozen: Sequence[Entry], dtype: torch.dtype | None) -> list[Job]:
        """What is written from here: tensors that zoo does not train, and those of `frozen` that stand as published, in `dtype` if it is one."""
        jobs = []
        published = {actual: name for name, actual in self.resolution.source.items()}
        for name in self.resolution.passed_through:
            target = published[name]
            entry = None
            if not target.startswith(PASS_THROUGH):
                with suppress(BridgeError):  # not under zoo's name
                    entry = self.as_written(self.bridge.publish([target])[target])
            if entry is not None:
                jobs += self._to_hf(entry, name)
            else:
                jobs.append(copy_job(name, self.reader, target.removeprefix(PASS_THROUGH), to_zoo=False))
        for wanted in frozen:
            jobs += [job if dtype is None else fp8.cast(job, dtype) for job in self.frozen(wanted)]
        return jobs

    def as_written(self, wanted: Entry) -> Entry:
        """A published entry, in the layout that the tensor has or had here where its rule keeps that."""
        if wanted.zoo in self.layouts:
            return in_layouts({wanted.zoo: wanted}, self.layouts, self.folder)[wanted.zoo]
        entry = self.resolution.entries.get(wanted.zoo)
        if entry is None or not wanted.rule.keeps_layout or entry.layout not in wanted.rule.layouts:
            return wanted
        return replace(wanted, layout=entry.layout)

    def frozen(self, wanted: Entry) -> list[Job]:
        """What writes a frozen tensor from here as it is; nothing where that can't be."""
        entry = self.resolution.entries[wanted.zoo]
        if not wanted.rule.writes(self.dims):
            return []
        if entry.layout.patterns == (entry.rule.zoo,):
            return self._to_hf(wanted, self.resolution.source[entry.hf_names()[0]])
        if entry.layout.patterns != wanted.layout.patterns or len(entry.variants(self.dims)) > 1:
            return []
        names = entry.all_names(self.dims)
        return [copy_job(self.resolution.source[name], self.reader, name, to_zoo=False) for name in names]


@dataclass(frozen=True)
class Plan:
    """What one export writes: entries of all ranks, their published names, and the source's part."""

    entries: Mapping[str, Entry]
    names: Sequence[str]  # published ones of `entries`
    dims: Dims
    config: JsonObject
    source: Source | None
    dtype: torch.dtype | None
    copies: Sequence[Job] = field(default=())  # from the source, by rank 0
    copied: frozenset[str] = frozenset()  # zoo names among them
    fp8: PublishedFP8 | None = None  # which tensors are in FP8; `dtype` is that of the others

    def dtype_of(self, zoo_name: str, parameter: Tensor, published: str = "") -> torch.dtype:
        """The dtype that a tensor is written in, or the `published` one that is a part of it."""
        if self.dtype is not None:
            return self.dtype
        return parameter.dtype if self.source is None else self.source.dtype_of(zoo_name, published)

    def widths(self, zoo_name: str, parameter: Tensor) -> list[int]:
        """Bytes of an element of the published tensors of one, the largest first; nearly always they are alike."""
        names = self.entries[zoo_name].all_names(self.dims)
        return sorted({self.dtype_of(zoo_name, parameter, name).itemsize for name in names}, reverse=True)


def make_plan(
    bridge: Bridge, zoo_names: Sequence[str], dims: Dims, config: PretrainedConfig | JsonMapping | None,
    source_folder: Place | str | Path | None, dtype: torch.dtype | None, stated: torch.dtype | None, frozen: Sequence[str],
) -> Plan:  # fmt: skip
    """Pair names with rules and with the source; nothing is written yet. With `fp8.DTYPE` matrices are in FP8, and all else in bf16."""
    entries = bridge.publish(zoo_names)
    source = Source.open(source_folder, bridge, zoo_names, dims)
    if source is not None:
        entries = {name: source.as_written(entry) for name, entry in entries.items()}
    published = bridge.fp8 if dtype == fp8.DTYPE else None
    if published is not None:
        dtype = stated = fp8.OTHERS
        entries = {name: entry.in_fp8(published) for name, entry in entries.items()}
    names = bridge.published_names(entries.values(), dims)
    copied: list[Entry] = []
    if source is not None and (dtype is None or published is not None):
        copied = [entries[name] for name in frozen if source.frozen(entries[name])]
    copies = source.copies(copied, dtype) if source else []
    copies = by_width(copies if published is None else fp8.in_fp8(copies, published))
    plain = _plain_config(config, source)
    if source is None and bridge.fresh_config is not None:
        plain = bridge.fresh_config(plain, names)
    if bridge.export_config is not None:
        others = {tensor.name for job in copies for tensor in job.planned}.difference(names)
        plain = bridge.export_config(plain, [*names, *others])
    if SCORE in entries:  # transformers' ForSequenceClassification model with one number a sequence
        classes = [OF_TOKENS.sub("ForSequenceClassification", str(name)) for name in plain.get("architectures") or ()]
        plain = {**plain, "architectures": classes, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if stated is not None:
        plain = with_dtype(plain, stated)
    if published is not None:
        plain = fp8.quantised_config(
            plain, bridge, {*names, *(tensor.name for job in copies for tensor in job.planned)}
        )
        names = [*names, *(f"{name}{SCALE}" for name in names if published.has(name))]
    zoo_copied = frozenset(entry.zoo for entry in copied)
    return Plan(entries, names, dims, plain, source, dtype, copies, zoo_copied, published)


def _plain_config(config: PretrainedConfig | JsonMapping | None, source: Source | None) -> JsonObject:
    """The config as a dict, as save_pretrained would write it."""
    if isinstance(config, Mapping):
        return unquantised(dict(config))
    if config is not None:
        return json.loads(config.to_json_string())
    if source is None:
        raise UserError("export: no config given, and no source folder to take it from")
    path = source.files / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the export a config")
    return unquantised(read_object(path))


def with_dtype(config: JsonObject, dtype: torch.dtype) -> JsonObject:
    """The config with `dtype` at its top, and wherever a part of it states one."""
    name = str(dtype).removeprefix("torch.")

    def restated(part: JsonObject) -> JsonObject:
        return {
            key: name if key in ("dtype", "torch_dtype") else restated(value) if isinstance(value, dict) else value
            for key, value in part.items()
        }

    return {**restated(config), "dtype": name}
