"""`RowSet`: the rows of all entries of data.train or data.eval, numbered one after the other.

Tables give any row by its place. Streams are read in order, and keep only the rows that are still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np

from zoo.config.entries import FORMS, MEDIA_KEYS, DataEntry, MediaLimits, is_bundled
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError, raised
from zoo.data.sources.formats.choose import PREFERENCE
from zoo.data.sources.kept.checked import CheckedRows
from zoo.data.sources.lines import locate, numbered_items
from zoo.data.sources.mixture import Mixture, SampleId, SourceShare
from zoo.data.sources.references import Access, shown
from zoo.data.sources.rows import Row, no_rows, parse_row
from zoo.data.sources.streams import RowStream, State, is_stream, open_stream
from zoo.data.sources.tables import form_of, kind_of, open_table
from zoo.errors import UserError
from zoo.files import expanded

_FIRST = 10  # rows that are looked at before ranks are started
LOOKED_AT = 256  # rows whose files are looked for at the start
_QUICK = 2**26  # bytes that are read for them
MOST_NAMED = 20  # columns that a note lists
ONE_SOUND = "one audio"  # of a model's media: a sound, but no second one in a row


class RowSet(Sequence[Row]):
    """Rows of several tables and streams, by their number over all of them.

    Args:
        parts: a table or a stream of each entry.
        names: what the entries are called.
        shares: the weight and epochs of each; None gives each row once an epoch.
        limits: of the media of each, where an entry has its own; None: of none.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Row] | RowStream],
        names: Sequence[str],
        shares: Sequence[SourceShare] | None = None,
        limits: Sequence[MediaLimits | None] | None = None,
    ) -> None:
        self.parts, self.names = list(parts), list(names)
        self.shares = [
            replace(share, rows=None if isinstance(part, RowStream) else len(part))
            for part, share in zip(parts, shares or [SourceShare(None)] * len(parts), strict=True)
        ]
        self.limits = list(limits or [None] * len(self.parts))
        self.opening: list[str] = []  # notes on how they were opened
        self._mixture = Mixture(self.shares, 0, False)  # numbers rows; orders come with the seed of `order`

    def __len__(self) -> int:
        """Rows, bad ones that are not yet known to be bad included; with a stream, a number above them all."""
        return self._mixture.total

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.row(SampleId(index))

    def row(self, sample_id: SampleId) -> Row:
        """The row of a sample; RowError where it is a bad one that is read when it is asked for."""
        part, index, _ = self._mixture.locate(sample_id)
        row, limits = self.parts[part][index], self.limits[part]
        return row if limits is None else replace(row, limits=limits)

    def name(self, sample_id: SampleId) -> str:
        """Where a sample's row comes from, for messages."""
        try:
            return self.row(sample_id).source
        except RowError as error:
            return error.source

    @property
    def sizes(self) -> list[int | None]:
        """Rows of each part; None for a stream."""
        return [share.rows for share in self.shares]

    def order(self, epoch: int, seed: int, shuffle: bool, sizes: Sequence[int | None] | None = None) -> np.ndarray:
        """(N,) int64 sample ids of an epoch, in order.

        Args:
            epoch: from 0.
            seed: what the order follows from.
            shuffle: whether rows come in a new order each time.
            sizes: rows of each part when the epoch began, where rows have been added since; None: those of today.
        """
        if sizes is None:
            return Mixture(self.shares, seed, shuffle).order(epoch)
        former = self._former(sizes, seed, shuffle)
        return self._mixture.renumbered(former.order(epoch), former)

    def epoch_size(self, epoch: int) -> int:
        """The number of samples of an epoch, as `order` has them."""
        return self._mixture.size(epoch)

    def renumber(self, ids: Iterable[SampleId], sizes: Sequence[int | None]) -> list[SampleId]:
        """Ids of samples as numbered when the parts had these sizes, as they are numbered now that rows were added."""
        former = self._former(sizes, 0, False)
        numbers: list[SampleId] = self._mixture.renumbered(np.fromiter(ids, np.int64), former).tolist()
        return numbers

    def _former(self, sizes: Sequence[int | None], seed: int, shuffle: bool) -> Mixture:
        shares = [replace(share, rows=rows) for share, rows in zip(self.shares, sizes, strict=False)]
        return Mixture(shares, seed, shuffle)

    def notes(self, *, pairs: bool = False, rewards: bool = False) -> list[str]:
        """Notes for the user on how rows are read, by the rows in memory or the first one of each part.

        `pairs`: both answers are trained on; `rewards`: answers are sampled for them.
        """
        notes = list(self.opening)
        for part, name in zip(self.parts, self.names, strict=True):
            first = None
            with suppress(RowError, IndexError):
                first = part.peek() if isinstance(part, RowStream) else part[0]
            if first is not None and first.form == PREFERENCE and not pairs:
                learnt = "the chosen answers are learnt, the rejected ones are skipped (train.loss=dpo compares them)"
                notes.append(f"{name} has preference pairs: {learnt}")
            if first is not None and first.extra and not rewards:
                notes.append(f"{name} has extra, which rewards of rl.algorithm alone take")
            if isinstance(part, CheckedRows):
                skipped = sorted(part.skipped())
            else:
                rows = part if isinstance(part, list) else [first] if first is not None else []
                skipped = sorted({column for row in rows for column in row.skipped})
            if skipped:
                more = f" and {len(skipped) - MOST_NAMED} more" if len(skipped) > MOST_NAMED else ""
                named = ", ".join(map(shown, skipped[:MOST_NAMED]))
                notes.append(f"{name} has columns that are not read: {named}{more}")
        return notes

    @property
    def has_stream(self) -> bool:
        """Whether one of the parts is a stream: then nobody knows how many rows there are."""
        return any(isinstance(part, RowStream) for part in self.parts)

    def forget(self, wanted: Iterable[SampleId]) -> list[range]:
        """Let go of a stream's rows before the first of `wanted`; the numbers of rows that are gone."""
        forgotten = []
        for part, first in self._oldest(wanted).items():
            stream, offset = self.parts[part], self._mixture.offsets[part]
            assert isinstance(stream, RowStream)
            stream.forget(first)
            forgotten.append(range(offset, offset + first))
        return forgotten

    def stream_state(self, wanted: Iterable[SampleId]) -> dict[str, State]:
        """The places from which streams have to be read to give `wanted`, as plain values; {} without streams."""
        oldest = self._oldest(wanted) if self.has_stream else {}
        return {
            str(part): stream.state(oldest.get(part, stream.next))
            for part, stream in enumerate(self.parts)
            if isinstance(stream, RowStream)
        }

    def load_stream_state(self, state: Mapping[str, State]) -> None:
        """Send the streams to a saved place."""
        for part, saved in state.items():
            stream = self.parts[int(part)]
            assert isinstance(stream, RowStream)
            stream.load(saved)

    def _oldest(self, ids: Iterable[SampleId]) -> dict[int, int]:
        """Part -> the first row of a stream that is among the samples."""
        oldest: dict[int, int] = {}
        for part, row, _ in map(self._mixture.locate, ids):
            if isinstance(self.parts[part], RowStream):
                oldest[part] = min(oldest.get(part, row), row)
        return oldest


def spread(rows: int, most: int) -> list[int]:
    """Numbers of up to `most` of so many rows, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, rows - 1, min(rows, most)).round().astype(np.int64)).tolist()


def spread_over_kinds(rows: RowSet, most: int) -> list[int]:
    """`spread` of the rows of one part, and, where it is in memory, the first row of each further kind of media."""
    numbers = spread(len(rows), most)
    (part,) = rows.parts
    if isinstance(part, CheckedRows):
        _, firsts = np.unique(part.media, return_index=True)
        seen = set(part.media[numbers].tolist())
        numbers += [first for first in firsts.tolist() if part.media[first] not in seen]
    return sorted(numbers)


def open_rows(
    entries: Sequence[DataEntry],
    data: DataConfig,
    modalities: Sequence[str],
    on_bad: Callable[[RowError], None],
    *,
    max_rows: int | None = None,
    evaluation: bool = False,
) -> RowSet:
    """The rows of some entries of data.train or data.eval.

    Args:
        entries: where rows come from.
        data: root, outside_root and urls are used, and the limits of media.
        modalities: what the model takes. Rows of a bundled set with other media are skipped.
        on_bad: called with each bad row that is found on opening.
        max_rows: use the first so many rows only.
        evaluation: the entries are those of data.eval: of rows held out, those are taken, and a stream gives its first
            `max_rows`.

    Raises:
        UserError: no such file, data set or split.
    """
    key = "data.eval" if evaluation else "data.train"
    parts: list[Sequence[Row] | RowStream] = []
    notes: list[str] = []
    for entry in entries:
        entry = _with_literal_tags(entry, data, modalities)
        access = partial(_access, data, entry.root)
        if is_stream(entry):
            stream = open_stream(entry, access, evaluation=evaluation, key=key)
            parts.append(_first(stream, str(entry), max_rows, on_bad) if evaluation else stream)
            continue
        rows = open_table(entry, access, on_bad, evaluation=evaluation, key=key)
        if entry.kinds is not None:
            rows = _of_kinds(rows, entry, entry.kinds, key)
        if isinstance(rows, CheckedRows):  # read already, so that rows which can't be used are known
            bundled = entry.path is not None and is_bundled(entry.path)
            rows = _of_modalities(rows, modalities, None if bundled else on_bad)
            if not bundled:
                notes += _looked_at(rows, data, on_bad)
        parts.append(rows)
    if max_rows is not None:
        left = max_rows
        for number, part in enumerate(parts):
            assert not isinstance(part, RowStream)
            parts[number] = first = part if len(part) <= left else part[:left]
            left -= len(first)
    has_limits = [any(getattr(entry, name) is not None for name in MEDIA_KEYS) for entry in entries]
    row_set = RowSet(
        parts,
        list(map(str, entries)),
        [SourceShare(None, entry.weight, entry.epochs) for entry in entries],
        [
            MediaLimits.from_data(data, entry) if has_own else None
            for entry, has_own in zip(entries, has_limits, strict=True)
        ],
    )
    row_set.opening = notes
    return row_set


def _with_literal_tags(entry: DataEntry, data: DataConfig, modalities: Sequence[str]) -> DataEntry:
    """The entry, its tags text where the recipe says so or the model reads texts alone, unless it says itself how they are read."""
    literal = data.literal_tags or set(modalities) <= {"text"}
    return replace(entry, literal_tags=True) if literal and entry.literal_tags is None else entry


def _access(data: DataConfig, root: str | None, folder: Path) -> Access:
    """The media that rows of an entry may name, with a root or none, whose file lies in a folder."""
    root = data.root if root is None else root
    return Access(folder if root is None else expanded(root), data.outside_root, data.urls)


def _of_kinds(rows: Sequence[Row], entry: DataEntry, kinds: Sequence[str], key: str) -> CheckedRows:
    """The rows of the entry's kinds."""
    if not isinstance(rows, CheckedRows):
        reason = "its rows are read when their turn comes; kinds is for JSONL, JSON, CSV and bundled sets."
        raise UserError(f"{key}: kinds of {entry}: {reason}")
    of_rows = rows.kinds()
    known = set(of_rows.tolist())
    missing = next((kind for kind in kinds if kind not in known), None)
    if missing is not None:
        listed = ", ".join(sorted({kind or "none" for kind in known}))
        raise UserError(f"{key}: {entry} has no rows of kind {missing}; their kinds: {listed}.")
    return rows.taken(np.isin(of_rows, list(kinds)))


def _of_modalities(
    rows: CheckedRows, modalities: Sequence[str], on_bad: Callable[[RowError], None] | None
) -> CheckedRows:
    """The rows whose media a model takes; the others are bad rows, where somebody is to know of them."""
    refused: dict[int, RowError] = {}
    for media, first in zip(*np.unique(rows.media, return_index=True), strict=True):
        try:
            check_modalities(rows[int(first)], modalities)
        except RowError as error:
            refused[int(media)] = error
    bad = np.isin(rows.media, list(refused))
    if on_bad is not None:
        for index in np.flatnonzero(bad).tolist():
            on_bad(refused[int(rows.media[index])].at(rows.source(index)))
    return rows.taken(~bad) if refused else rows


def _looked_at(rows: CheckedRows, data: DataConfig, on_bad: Callable[[RowError], None]) -> list[str]:
    """Look for the files of some rows, spread over all; a note on what was looked at, where that is not all.

    Under data.on_error=raise a missing one is told at once; else it is left out when it is opened, as all others are.
    """
    with_media = np.flatnonzero(rows.media)
    missing = 0
    for index in spread(len(with_media), LOOKED_AT) if len(with_media) else ():
        try:
            rows[int(with_media[index])].check_files()
        except RowError as error:
            missing += 1
            if data.on_error == "raise":
                on_bad(error)
    if len(with_media) <= LOOKED_AT:
        return []
    outcome = f"{missing} of them are not there" if missing else "all are there"
    return [
        f"{rows.name}: the files of {LOOKED_AT} of {len(with_media):,} rows were looked for, {outcome}; others show when they are opened"
    ]


def foreign_media(row: Row, modalities: Sequence[str]) -> set[str]:
    """Kinds of media in the row that a model does not take."""
    foreign = row.media.difference(modalities)
    return foreign - {"audio"} if ONE_SOUND in modalities and len(row.audios) == 1 else foreign


def check_modalities(row: Row, modalities: Sequence[str]) -> None:
    """Raise RowError ("modality") for a row with media that the model does not take."""
    foreign = foreign_media(row, modalities)
    if foreign:
        seen = " and ".join(sorted(foreign))
        text = f"the row has {seen}, but this model takes {', '.join(modalities)}; leave it out."
        raise RowError(row.source, "modality", text)


def _first(stream: RowStream, name: str, count: int | None, on_bad: Callable[[RowError], None]) -> list[Row]:
    """The first rows of a stream to evaluate on."""
    if count is None:
        raise UserError(f"data.eval={name}: a stream has no end; say how many rows with train.eval_rows.")
    rows: list[Row] = []
    for index in range(count):
        try:
            rows.append(stream[index])
        except RowError as error:
            on_bad(error)
    return rows


def check_first_rows(entry: DataEntry, data: DataConfig, modalities: Sequence[str], key: str) -> None:
    """Read the first rows of an entry that is a file of lines, whose formats are zoo's own.

    Raises:
        RowError: one of them can't be used.
        UserError: no such file, or one without rows.
    """
    path = entry.path
    own_format = entry.format is not None and entry.format not in FORMS
    if path is None or own_format or is_bundled(path) or kind_of(path) != "lines":
        return
    file = locate(path, key)
    if file.suffix == ".json" and file.stat().st_size > _QUICK:  # a list is read as a whole
        return
    form = form_of(_with_literal_tags(entry, data, modalities))
    access = _access(data, entry.root, file.parent)
    number = 0
    for number, line in islice(numbered_items(file, str(entry)), _FIRST):
        try:
            parse_row(line, f"{entry}:{number}", access, form)
        except RowError as error:
            raise raised(error) from error
    if not number:
        raise UserError(no_rows(path))
