"""Compare two checkpoints, tensor by tensor and, on some rows, token by token; `zoo.verify`.

Each side may be a Hugging Face folder, in any layout that zoo reads, zoo's own weights, or a run's checkpoint. Tensors are
compared in zoo's layout, so two layouts of the same weights are equal. A tensor that only one side has is missing in the
other. Log-probabilities of a Hugging Face folder come from transformers, so they check the code that wrote the checkpoint.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from zoo.bridge import Comm, SafetensorsFolder
from zoo.bridge.files.record import verify_checksums
from zoo.bridge.load import unequal
from zoo.bridge.mapping.table import Bridge, Entry
from zoo.bridge.mapping.transforms import Dims
from zoo.bridge.native import PASS_THROUGH, native
from zoo.bridge.progress import Progress
from zoo.bridge.streams import Folder, of_expert
from zoo.checkpoint.export import exported_tensors
from zoo.checkpoint.selection import check_beside_weights
from zoo.config.layers.layer import Overrides, combined
from zoo.config.locate import Place, locate, read_arch
from zoo.data.sources.lines import locate as locate_rows
from zoo.errors import UserError
from zoo.logging.result import Model, run_of
from zoo.model.meta_model import build_meta_model, published_names
from zoo.model.run_settings import as_overrides, settings_of
from zoo.parallel.process_state import preserve_process_state
from zoo.tools.convert import convert
from zoo.tools.hf_score import hf_logprobs
from zoo.tools.score import score
from zoo.types import JsonObject

MOST = 1000  # nats; the largest tolerance
LOGPROBS = 1e-3  # largest difference that passes for two ways to compute the same in fp32


@dataclass(frozen=True)
class Compared:
    """One tensor: `status` is equal, differs, shape, missing in A, missing in B."""

    name: str
    status: str
    max_difference: float | None = None  # absolute, where shapes agree
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    dtypes: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`; `equal` where nothing differs."""

    tensors: list[Compared]
    # source, labels, max_difference of log-probabilities; skipped: why transformers can't be compared there, or None
    rows: list[JsonObject] = field(default_factory=list)
    tolerance: float = LOGPROBS

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by status."""
        return dict(Counter(tensor.status for tensor in self.tensors))

    @property
    def largest_difference(self) -> float:
        """The largest difference of any log-probability."""
        return max((row["max_difference"] for row in self.compared_rows), default=0.0)

    @property
    def compared_rows(self) -> list[JsonObject]:
        """The rows that both sides can compute."""
        return [row for row in self.rows if row["skipped"] is None]

    @property
    def equal(self) -> bool:
        """Whether every tensor is equal and every log-probability within the tolerance."""
        return set(self.counts) <= {"equal"} and self.largest_difference <= self.tolerance

    def as_dict(self) -> JsonObject:
        """The result as plain values."""
        values = {"equal": self.equal, "counts": self.counts, "tensors": [asdict(t) for t in self.tensors]}
        if self.rows:
            values |= {"rows": self.rows, "tolerance": self.tolerance}
        return values


@preserve_process_state()
def verify(
    a: Model,
    b: Model,
    *,
    rows: str | Path | None = None,
    overrides: Overrides = (),
    tolerance: float = LOGPROBS,
    in_process: bool = False,
    quiet: bool = True,
) -> Verification:
    """Compare two checkpoints of one family.

    Args:
        a: a checkpoint, as `zoo.convert` and `zoo.score` take it.
        b: the same, to compare with `a`.
        rows: a JSONL file, or a bundled set, whose answers' log-probabilities are compared too, in fp32.
        overrides: of the recipe under which zoo computes them, such as `packing.mode=none`.
        tolerance: largest difference of two log-probabilities (natural) that still counts as equal.
        in_process: zoo's own log-probabilities are computed in this process, as for the command `zoo verify`.
        quiet: no progress on stderr.

    Raises:
        UserError: a checkpoint does not exist, a tolerance that is no number from 0, overrides without rows, or the two belong to
            different families.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance <= MOST:
        raise UserError(f"tolerance={tolerance!r}: wanted a number from 0 to {MOST}, such as 1e-3")
    if rows is not None:
        locate_rows(str(rows), "rows")
    elif overrides:
        raise UserError(
            f"{next(iter(overrides))}: keys of the recipe count for rows alone; leave it out, or give rows=FILE"
        )
    places = [locate(run_of(path)) for path in (a, b)]
    with _side(places[0]) as left, _side(places[1]) as right:
        if left.family != right.family:
            raise UserError(f"{a} is of {left.family}, {b} of {right.family}: nothing can be compared")
        progress = None if quiet else Progress("comparing", left.nbytes)
        tensors = list(_compare(left, right, progress or (lambda count: None)))
        if progress is not None:
            progress.close()
    rows_compared = [] if rows is None else _compare_rows(places, rows, overrides, in_process)
    return Verification(tensors, rows_compared, tolerance)


@contextmanager
def _side(weights: Place) -> Iterator[_Side]:
    """A checkpoint's tensors; those of a run as its export has them, which is written to a disk only where it needs a model."""
    if weights.kind != "run":
        with SafetensorsFolder(weights.weights) as reader:
            if weights.kind == "zoo":
                verify_checksums(weights.folder, Comm())
            yield _Side.from_tensors(reader, read_arch(weights.files), own=weights.kind == "zoo")
        return
    check_beside_weights(weights)
    with exported_tensors(weights) as tensors:
        if tensors is not None:
            yield _Side.from_tensors(tensors, tensors.config)
            return
    with tempfile.TemporaryDirectory(prefix="zoo-verify-") as folder:
        written = locate(str(convert(weights.folder, Path(folder) / "export", quiet=True)))
        with SafetensorsFolder(written.weights) as reader:
            yield _Side.from_tensors(reader, read_arch(written.files))


@dataclass(frozen=True)
class _Side:
    """A checkpoint's tensors by zoo's names; those that zoo does not train, and unknown ones, under their own."""

    family: str
    reader: Folder
    entries: Mapping[str, Entry]
    source: Mapping[str, str]  # name in the table -> name in the files
    others: Mapping[str, str]  # published name -> name in the files
    dims: Dims

    @classmethod
    def from_tensors(cls, reader: Folder, arch: JsonObject, own: bool = False) -> Self:
        """Everything that is there, whether or not it makes a whole model; `own`: under zoo's names."""
        names = published_names(reader, arch) if own else reader.names()
        plan = build_meta_model(arch, names)
        table: Bridge = native(plan.bridge) if own else plan.bridge
        resolution = table.resolve(reader.names(), plan.parameters, plan.dims, allow=["*"])
        used = {resolution.source[part] for entry in resolution.entries.values() for part in entry.all_names(plan.dims)}
        passed = resolution.redundant - set(unequal(resolution, reader))  # the others hold nothing of their own
        others = {
            name.removeprefix(PASS_THROUGH) if own else name: actual
            for name, actual in resolution.source.items()
            if actual not in used and name not in passed
        }
        entries = {
            name: _fitting(entry, resolution.source, reader, plan)
            for name, entry in resolution.entries.items()
            if not (plan.dims.tied and entry.rule.tied_to)
        }
        return cls(plan.family.name, reader, entries, resolution.source, others, plan.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that zoo trains."""
        names = [self.source[part] for entry in self.entries.values() for part in entry.all_names(self.dims)]
        return sum(math.prod(self.reader.shape(name)) * self.reader.dtype(name).itemsize for name in names)

    def parts(self, name: str) -> Iterator[Tensor]:
        """A zoo tensor, expert by expert where it stacks them."""
        entry = self.entries[name]
        transform = entry.layout.transform
        if not entry.rule.stacked:
            parts = [self.reader.read(self.source[part]) for part in entry.all_names(self.dims)]
            yield transform.to_zoo(parts, self.dims)
            return
        for expert in range(entry.rule.experts(self.dims)):
            yield transform.to_zoo(of_expert(entry, expert, self.source, self.reader), self.dims)


def _fitting(entry: Entry, source: Mapping[str, str], reader: Folder, plan: Any) -> Entry:
    """The entry in the layout that the shapes are of; the first where none fits."""
    shape = tuple(plan.parameters[entry.zoo].shape)
    for variant in entry.variants(plan.dims):
        try:
            wanted = variant.hf_shapes(shape, plan.dims)
        except ValueError:
            continue
        if all(reader.shape(source[name]) == stored for name, stored in wanted.items()):
            return variant
    return entry


def _compare(left: _Side, right: _Side, compared: Callable[[int], None]) -> Iterator[Compared]:
    """All tensors; `compared` hears of the bytes of each part on the left."""
    for name in sorted({*left.entries, *right.entries}):
        if name not in left.entries or name not in right.entries:
            yield Compared(name, "missing in A" if name not in left.entries else "missing in B")
            continue
        parts = []
        for x, y in zip(left.parts(name), right.parts(name), strict=True):
            parts.append(_difference(name, x, y))
            compared(x.nbytes)
        yield _joined(name, parts)
    for name in sorted({*left.others, *right.others}):
        if name not in left.others or name not in right.others:
            yield Compared(name, "missing in A" if name not in left.others else "missing in B")
            continue
        yield _difference(name, left.reader.read(left.others[name]), right.reader.read(right.others[name]))


def _difference(name: str, a: Tensor, b: Tensor) -> Compared:
    shapes = tuple(a.shape), tuple(b.shape)
    dtypes = str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")
    if shapes[0] != shapes[1]:
        return Compared(name, "shape", None, shapes, dtypes)
    if a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)):
        return Compared(name, "equal", 0.0, shapes, dtypes)
    difference = (a.double() - b.double()).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    return Compared(name, "equal" if largest == 0 else "differs", largest, shapes, dtypes)


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, as int64 where they make whole ones: these are compared five times as fast as uint8."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 == flat.storage_offset() % 8 else flat


def _joined(name: str, parts: list[Compared]) -> Compared:
    """The worst of a tensor's experts; its shapes are those of the whole."""
    order = ["equal", "differs", "shape"]

    def badness(part: Compared) -> tuple[int, float]:
        difference = part.max_difference
        size = math.inf if difference is None or math.isnan(difference) else difference
        return order.index(part.status), size

    worst = max(parts, key=badness)
    if len(parts) == 1:
        return worst
    shapes = [None if shape is None else (len(parts), *shape) for shape in worst.shapes]
    return Compared(name, worst.status, worst.max_difference, (shapes[0], shapes[1]), worst.dtypes)


def _compare_rows(
    places: Sequence[Place], rows: str | Path, overrides: Overrides, in_process: bool
) -> list[JsonObject]:
    """Row by row, each side by its own code, read as the run did that made one of them."""
    known = [settings for settings in map(settings_of, places) if settings.values]
    overrides = combined(as_overrides(known[0]) if known else (), overrides)
    left, right = (_logprobs(weights, rows, overrides, in_process) for weights in places)
    mixed = len({weights.kind == "hf" for weights in places}) > 1
    compared = []
    for row, other in zip(left, right, strict=True):
        if row["token_ids"] != other["token_ids"]:
            raise UserError(f"{row['source']}: the two tokenizers or processors give different tokens")
        pairs = zip(row["labels"], row["logprobs"], other["logprobs"], strict=True)
        differences = [abs(x - y) for label, x, y in pairs if label != -100]
        result = {"source": row["source"], "labels": len(differences), "max_difference": max(differences, default=0.0)}
        compared.append(result | {"skipped": row.get("skipped") or other.get("skipped") if mixed else None})
    return compared


def _logprobs(weights: Place, rows: str | Path, overrides: Overrides, in_process: bool) -> list[JsonObject]:
    if weights.kind == "hf":
        return hf_logprobs(weights, rows, overrides)
    return score(weights.folder, rows, combined(["engine.precision=fp32"], overrides), in_process=in_process)
