"""`Lengths`: the size of every sample, in tokens and in cost, known alike on all ranks before anything is planned.

Guarantees:
- All ranks hold the same sizes, so they plan the same bins. `exchange` passes on to all ranks what one of them finds out.
- A row is measured once, by one of the ranks; starting takes each of N ranks 1/N of the measuring.

Kept sizes, in the cache folder, are of these rows, this processor and these settings, by a digest of all: a later start needs neither
tokenizer nor headers. Some rows are measured again: where one has another size, all are. The size of a file that was replaced under its
name is corrected when its row is encoded, as ever.

Costs: 12 bytes a row (and variant, under data.augment), or 250 a row that is to come where there is a stream. Measuring
tokenizes a row's texts and reads its files' headers, 0.2 to 1 ms; a row whose headers don't suffice is encoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import transformers

import zoo.data
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sources.kept.checked import CheckedRows
from zoo.data.sources.kept.columns import numbers, record_batch
from zoo.data.sources.kept.store import read_whole, write_whole
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.row_set import spread
from zoo.errors import UserError
from zoo.files import cache_folder

SHARE = 8  # rows that each rank measures at a time: then they exchange, and no step waits for many
HEADERS = 1024  # the same where only headers are read, before the first step
DENSE = 2**28  # keys up to which there is a place for each
LEAST_KEPT = 2**13  # rows below which no sizes are kept: measuring them takes seconds
KEPT_PROBES = 16  # rows with kept sizes that are measured again
LENGTH_PROBES = 512  # rows whose lengths stand for all in an estimate
EXACT_ROWS = 2**18  # rows up to which all are measured before the first step
EXACT_SAMPLES = 2**22  # samples of all epochs up to which they are packed before the first step


class Size(NamedTuple):
    """Tokens and cost of a sample."""

    tokens: int
    cost: int  # by the `cost` of `Lengths`


type Correction = list[Any]  # plain values: [key, tokens, cost] or [key, source, cause, message]
type Findings = dict[SampleId, Size | RowError]  # the size of each sample, or why its row can't be used


class RankGroup(Protocol):
    """The ranks of a run that plan together. They all call `gather` in the same order."""

    rank: int
    size: int

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        ...

    def merge[T](self, value: T, merged: Callable[[Sequence[T]], T]) -> T:
        """Every rank's value in one; `merged` makes one of several, in the order of their ranks."""
        ...


class OneRank:
    """A `RankGroup` of one rank."""

    rank, size = 0, 1

    def gather[T](self, value: T) -> list[T]:
        """The value."""
        return [value]

    def merge[T](self, value: T, merged: Callable[[Sequence[T]], T]) -> T:
        """The value."""
        return value


UNKNOWN = Size(0, 0)
BAD = Size(-1, 0)


class _Table:
    """Key -> size: an array, or a dict where there are too many keys."""

    def __init__(self, keys: int) -> None:
        self.size, self.dense = keys, keys <= DENSE
        self._tokens = np.zeros(keys if self.dense else 0, np.int32)
        self._costs = np.zeros(len(self._tokens), np.int64)
        self._sizes: dict[SampleId, Size] = {}

    def __getitem__(self, key: SampleId) -> Size:
        if self.dense:
            return Size(int(self._tokens[key]), int(self._costs[key]))
        return self._sizes.get(key, UNKNOWN)

    def __setitem__(self, key: SampleId, size: Size) -> None:
        if self.dense:
            self._tokens[key], self._costs[key] = size
        else:
            self._sizes[key] = size

    def known(self, key: SampleId) -> bool:
        """Whether there is a size, or an error, of a key."""
        return bool(self._tokens[key]) if self.dense else key in self._sizes

    def known_of(self, keys: np.ndarray) -> np.ndarray:
        """(N,) bool, `known` of each key, where the table is dense."""
        return self._tokens[keys] != UNKNOWN.tokens

    def sizes_of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N,) tokens and (N,) costs of keys that are known, where the table is dense."""
        return self._tokens[keys], self._costs[keys]

    def fill(self, tokens: np.ndarray, costs: np.ndarray) -> None:
        """Sizes of the first keys, where none are known and `tokens` are not 0; the table is dense."""
        new = np.flatnonzero((self._tokens[: len(tokens)] == UNKNOWN.tokens) & (tokens > 0))
        self._tokens[new], self._costs[new] = tokens[new], costs[new]

    def keep(self, keys: set[SampleId]) -> None:
        """Drop the sizes of all other keys."""
        self._sizes = {key: size for key, size in self._sizes.items() if key in keys}


class Lengths:
    """Sizes of a source's samples, measured when they are asked for.

    Args:
        source: the rows; the same on every rank.
        cost: of a sample's size, as an integer of at least 1; None: its tokens.
        group: the ranks that share the measuring; None for one rank.
    """

    def __init__(
        self, source: SampleSource, cost: Callable[[SampleSize], int] | None = None, group: RankGroup | None = None
    ) -> None:
        self.source = source
        self.group = group or OneRank()
        self.block = SHARE * self.group.size
        self._cost = cost or (lambda size: size.length)
        self._known = _Table(source.variants * len(source))
        self._file: Path | None = None  # where sizes are kept, on the first rank
        self._recalled = False
        self._errors: dict[SampleId, RowError] = {}
        self._corrected: set[SampleId] = set()
        self._shrunk: list[SampleId] = []  # samples measured since the last exchange whose media were made smaller

    def knows(self, sample_id: SampleId) -> bool:
        """Whether a sample was measured."""
        return self._known.known(self.source.key(sample_id))

    def get(self, sample_id: SampleId) -> Size | None:
        """The size of a sample that was measured; None where its row is left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        key = self.source.key(sample_id)
        size = self._known[key]
        if size == BAD:
            self.source.leave_out(sample_id, self._errors[key])
            return None
        return size

    def ahead(self, ids: Iterable[SampleId]) -> None:
        """Measure samples that are not known, each rank its share, and exchange the findings."""
        self._share([sample_id for sample_id in dict.fromkeys(ids) if not self.knows(sample_id)], self._measure)

    def measure(self, ids: np.ndarray) -> bool:
        """Measure samples by their texts and the headers of their files; whether all are known then.

        Ranks share the work, as in `ahead`, but no sample is encoded: it ends at the first block in which headers don't
        suffice.
        """
        if not self._known.dense:
            return False
        keys = np.unique(np.asarray(ids) % self._known.size)
        unknown, size = keys[~self._known.known_of(keys)], HEADERS * self.group.size
        for first in range(0, len(unknown), size):
            block: list[SampleId] = unknown[first : first + size].tolist()
            self._share(
                block, lambda sample_ids: [self._try(sample_id, self.source.measure) for sample_id in sample_ids]
            )
            if not self._known.known_of(np.asarray(block)).all():
                return False
        return True

    def recall(self) -> None:
        """Take over the sizes that a former start has kept; every rank calls it."""
        if not are_kept(self.source):
            return
        kept = None
        if self.group.rank == 0:
            with contextlib.suppress(OSError):
                self._file = place_of(self.source)
                kept = load_sizes(self._file, len(self.source)) if self._file is not None else None
            if kept is not None and not self._holds(*kept):
                kept = None
        kept = self.group.gather(kept)[0]
        if kept is not None:
            self._known.fill(*kept)
            self._recalled = True

    def keep(self) -> None:
        """Keep the sizes for later starts, where all were measured by headers and texts, and none was recalled."""
        if self._file is None or self._recalled:
            return
        tokens, costs = self._known.sizes_of(np.arange(len(self.source)))
        tokens = np.maximum(tokens, 0)  # what is wrong with a bad row is found anew
        tokens[[*self._corrected, *self.source.shrunk_rows]] = 0
        save_sizes(self._file, tokens, costs)

    def _holds(self, tokens: np.ndarray, costs: np.ndarray) -> bool:
        """Whether some rows have these sizes."""
        known = np.flatnonzero(tokens)
        probes = known[spread(len(known), KEPT_PROBES)] if len(known) else known
        return all(
            self._try(SampleId(row), self.source.measure) == Size(int(tokens[row]), int(costs[row]))
            for row in probes.tolist()
        )

    def _share(
        self, ids: Sequence[SampleId], measure: Callable[[Sequence[SampleId]], Sequence[Size | RowError | None]]
    ) -> None:
        """Take over what all ranks find out about samples, of which each measures its share."""
        local_sizes = measure(ids[self.group.rank :: self.group.size])
        shrunk, self._shrunk = self._shrunk, []
        for rank, (share, smaller) in enumerate(self.group.gather((local_sizes, shrunk))):
            self.source.note_shrunk(smaller)
            for sample_id, finding in zip(ids[rank :: self.group.size], share, strict=True):
                if finding is not None:
                    self._put(sample_id, finding)

    def usable(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs of samples that were all measured, without those that are left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        tokens, costs = self._known.sizes_of(np.asarray(ids) % self._known.size)
        bad = tokens < 0
        for sample_id in np.asarray(ids)[bad].tolist():
            self.get(sample_id)
        return tokens[~bad], costs[~bad]

    def exchange[T](self, findings: Findings, value: T, merged: Callable[[Sequence[T]], T]) -> tuple[Findings, T]:
        """Correct the sizes that encoding has shown to differ from those measured, on any rank.

        Args:
            findings: of this rank.
            value: a further value of this rank.
            merged: makes one of several ranks' values.

        Returns:
            The findings of all ranks, and their values in one.

        Raises:
            UserError: a sample was corrected before, and has another length now.
        """

        def in_one(several: Sequence[tuple[Findings, T]]) -> tuple[Findings, T]:
            corrections = {key: finding for findings, _ in several for key, finding in findings.items()}
            return corrections, merged([value for _, value in several])

        everyone, of_all = self.group.merge((findings, value), in_one)
        for sample_id, finding in everyone.items():
            key = self.source.key(sample_id)
            known = self._known[key].tokens
            if key in self._corrected and not isinstance(finding, RowError) and finding.tokens != known:
                name = self.source.rows.name(sample_id)
                text = f"{name}: encoded twice, it has {known} tokens, then {finding.tokens}; does the file change?"
                raise UserError(text)
            self._corrected.add(key)
            self._put(sample_id, finding)
        return everyone, of_all

    def size_of(self, size: SampleSize) -> Size:
        """A sample's size as it is kept."""
        return Size(size.length, self._cost(size))

    def forget_all_but(self, ids: Iterable[SampleId]) -> None:
        """Keep what is known of these samples alone, where there is a stream: its samples never come again."""
        if self._known.dense:
            return
        kept = {self.source.key(sample_id) for sample_id in ids}
        self._known.keep(kept)
        self._corrected &= kept
        self._errors = {key: error for key, error in self._errors.items() if key in kept}

    def state_dict(self) -> list[Correction]:
        """The sizes and errors that encoding has corrected."""
        return [
            [key, *(self._errors[key].args if key in self._errors else self._known[key])]
            for key in sorted(self._corrected)
        ]

    def load_state_dict(self, state: list[Correction]) -> None:
        """Take over a saved run's corrections."""
        for key, *entry in state:
            self._corrected.add(key)
            self._put(key, RowError(*entry) if isinstance(entry[0], str) else Size(*entry))

    def remember(self, sizes: Mapping[SampleId, Size]) -> None:
        """Sizes of samples that a saved run had measured, where none are known."""
        for sample_id, size in sizes.items():
            if not self.knows(sample_id):
                self._put(sample_id, size)

    def _measure(self, ids: Sequence[SampleId]) -> list[Size | RowError | None]:
        """Sizes by the headers of files; of rows whose headers don't suffice, by encoding."""
        sizes = {sample_id: self._try(sample_id, self.source.measure) for sample_id in ids}
        left = [sample_id for sample_id, size in sizes.items() if size is None]
        self.source.prefetch(left)
        for sample_id in left:
            sizes[sample_id] = self._try(sample_id, lambda key: self.source.encoder.size(self.source.encode(key)))
        return list(sizes.values())

    def _try(self, sample_id: SampleId, measure: Callable[[SampleId], SampleSize | None]) -> Size | RowError | None:
        """The size, the error, or None where it is not known."""
        try:
            size = measure(sample_id)
        except RowError as error:
            return error.bare()
        if size is None:
            return None
        if size.fit is not None and size.fit.done:
            self._shrunk.append(sample_id)
        return self.size_of(size)

    def _put(self, sample_id: SampleId, finding: Size | RowError) -> None:
        key = self.source.key(sample_id)
        self._errors.pop(key, None)
        if isinstance(finding, RowError):
            self._errors[key] = finding
        self._known[key] = BAD if isinstance(finding, RowError) else finding


def are_kept(source: SampleSource) -> bool:
    """Whether sizes of a source's samples are kept; the same on all ranks."""
    checked = all(isinstance(part, CheckedRows) for part in source.rows.parts)
    return checked and not source.augment.strength and len(source) >= LEAST_KEPT


def place_of(source: SampleSource) -> Path | None:
    """Where the sizes of a source's samples are kept; None without a cache folder."""
    folder = cache_folder("lengths")
    if folder is None:
        return None
    encoder, digest = source.encoder, hashlib.blake2b(digest_size=16)
    for part in source.rows.parts:
        assert isinstance(part, CheckedRows)
        digest.update(part.content())
        digest.update(repr((part.access, part.form)).encode())
    settings = encoder.data.template, encoder.data.special_tokens, encoder.pair_align, encoder.labelled, encoder.embed
    digest.update(repr((source.sizes_follow_from(), settings, transformers.__version__)).encode())
    code = [inspect.getsourcefile(kind) for kind in type(source.processor).__mro__ if kind is not object]
    for file in sorted({*map(Path, filter(None, code)), *Path(zoo.data.__file__).parent.rglob("*.py")}):
        digest.update(file.read_bytes())
    with tempfile.TemporaryDirectory(prefix="zoo-processor-") as saved:
        source.processor.save(saved)
        for file in sorted(Path(saved).rglob("*")):
            digest.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    return folder / f"{digest.hexdigest()}.arrow"


def load_sizes(path: Path, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(rows,) int32 tokens, 0 where they are not known, and (rows,) int64 costs; None where none are kept."""
    table = read_whole(path)
    if table is None or table.column_names != ["tokens", "cost"] or len(table) != rows:
        return None
    return numbers(table["tokens"]), numbers(table["cost"])


def save_sizes(path: Path, tokens: np.ndarray, costs: np.ndarray) -> None:
    """Keep sizes, as `load_sizes` gives them; does nothing where the folder can't be written to."""
    import pyarrow as pa

    schema = pa.schema({"tokens": pa.int32(), "cost": pa.int64()})
    with contextlib.suppress(OSError):
        write_whole(path, schema, [record_batch([tokens, costs], schema)])
