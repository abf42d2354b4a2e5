"""`SampleSource`: rows to samples on demand, with a bounded cache and one place where bad rows are settled.

Costs: a row is encoded once while its sample stays in the cache (least recently used out first). Its size is found out
without encoding where texts and headers of files tell; `zoo.data.loading.lengths` keeps it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zoo.config.entries import parse_entry
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.defaults import VARIANTS
from zoo.data.media.decoder import HERE, Decoder, Here
from zoo.data.media.sizes import SampleSize
from zoo.data.processors.augment import Augment
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.mixture import Mixture, Part
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, is_bundled
from zoo.data.sources.streams import RowStream, is_stream, open_stream
from zoo.data.sources.tables import open_table
from zoo.errors import UserError
from zoo.files import Lines, expanded

RAISE_OR_DROP = "raise packing.budget, or set data.overlong to drop or truncate_text."
BAD_IN_A_ROW = 10_000  # rows of a stream that may be bad one after the other


class SampleSource:
    """Samples of rows of one or several sources, by visit (see `zoo.data.sources.mixture`).

    Bad rows follow `data.on_error`; a sample over the limit follows `data.overlong`: "error" makes it a bad row, "drop"
    leaves it out, "truncate_text" cuts trailing text (never a media token, never the last label: else a bad row).
    Whatever is left out is counted by cause in `counts` and listed in the `bad_rows` file.

    Args:
        rows: rows as `read_rows` gives them; `open` makes sources of several tables and streams.
        processor: encodes a row.
        data: on_error, overlong, labels, cache_mb, video_fps and max_frames are used.
        budget: packing.budget, the most tokens of a sample.
        align: multiple that a sample's length is padded to; it counts against the budget.
        bad_rows: JSONL that bad rows are appended to (source, cause, message), each once; None lists them nowhere.
            With several ranks, give it to one.
        augment: strength of random changes to the media, 0 to 1 (data.augment, for training rows).
        blank: share of answer tokens that are blanked in the input (data.blank_answers, for training rows).
        seed: what those follow from, beside epoch and row.
        decoder: who decodes media.
        tick: called for each row that is measured or encoded: what reads the data gets on.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        processor: Processor,
        data: DataConfig,
        *,
        budget: int,
        align: int = 1,
        bad_rows: Path | None = None,
        augment: float = 0.0,
        blank: float = 0.0,
        seed: int = 0,
        decoder: Decoder = HERE,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts: list[Sequence[Row] | RowStream] = []
        self.names = ["rows"]  # of the parts
        self._set_parts([list(rows)], [Part(0)])
        self.decoder = decoder
        self._tick = tick
        self.strength = augment
        self.blank = blank
        self.seed = seed
        self.processor = processor
        self.data = data
        self.limit = budget // align * align
        self.budget = budget
        self.counts: Counter[str] = Counter()
        self._bad_rows = bad_rows
        self._listed = _listed(bad_rows)
        self._bad: dict[int, RowError] = {}  # by number of the row
        self._left_out: set[int] = set()  # numbers of rows that are counted
        self._bad_since_good = 0
        self._cache: OrderedDict[int, Sample] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        specs: Iterable[Any],
        processor: Processor,
        data: DataConfig,
        *,
        max_rows: int | None = None,
        evaluation: bool = False,
        **options: Any,
    ) -> SampleSource:
        """The samples of some entries of data.train or data.eval.

        Of a bundled set, rows with media that the model doesn't take are passed over.

        Args:
            specs: entries as `zoo.config.entries.parse_entry` takes them: paths, mappings, rows as objects.
            max_rows: use the first so many rows only.
            evaluation: the entries are those of data.eval: of rows held out, those are taken.
            options: budget, align, bad_rows, augment, blank, seed and decoder, as the class takes them.

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no such file, or no row is left.
        """
        key = "data.eval" if evaluation else "data.train"
        entries = [parse_entry(spec, key) for spec in specs]
        source = cls([], processor, data, **options)
        parts: list[Sequence[Row] | RowStream] = []
        for entry in entries:
            access = partial(_access, data, entry.root)
            bundled = entry.path is not None and is_bundled(entry.path)
            if is_stream(entry):
                stream = open_stream(entry, access, evaluation=evaluation, key=key)
                parts.append(source._first(stream, str(entry), max_rows) if evaluation else stream)
                continue
            rows = open_table(entry, access, source.settle, evaluation=evaluation, key=key)
            if isinstance(rows, list):  # read already, so that what can't be used is known
                rows = [row for row in rows if source._takes(row, bundled)]
            parts.append(rows)
        if max_rows is not None:
            left = max_rows
            for number, part in enumerate(parts):
                assert not isinstance(part, RowStream)
                parts[number] = part if len(part) <= left else part[:left]
                left -= len(parts[number])  # type: ignore[arg-type]
        source._set_parts(parts, [Part(None, entry.weight, entry.epochs) for entry in entries])
        source.names = [str(entry) for entry in entries]
        if not len(source):
            names = ", ".join(map(str, entries))
            if not source.counts and any(entry.held_out is not None for entry in entries):
                mend = (
                    "give a larger held_out, or data.eval=none" if evaluation else "give a smaller held_out"
                )
                raise UserError(f"{key}: no row of {names} is left by held_out; {mend}.")
            raise UserError(f"{names}: no usable row ({source.left_out()}); see bad_rows.jsonl.")
        return source

    def _set_parts(self, parts: list[Sequence[Row] | RowStream], shares: list[Part]) -> None:
        self.parts = parts
        self.shares = [
            replace(share, rows=None if isinstance(part, RowStream) else len(part))
            for part, share in zip(parts, shares, strict=True)
        ]
        self.mixture = Mixture(self.shares, 0, False)  # numbers rows; orders come with the seed of `order`

    def _first(self, stream: RowStream, name: str, count: int | None) -> list[Row]:
        """The first rows of a stream to evaluate on."""
        if count is None:
            raise UserError(f"data.eval={name}: a stream has no end; say how many rows with train.eval_rows.")
        found: list[Row] = []
        for place in range(count):
            try:
                found.append(stream[place])
            except RowError as error:
                self.settle(error)
        return found

    def order(
        self, epoch: int, seed: int, shuffle: bool, sizes: Sequence[int | None] | None = None
    ) -> np.ndarray:
        """(N,) int64 visits of an epoch, in order; `sizes`: of the rows that there were when it began, as `sizes` has them."""
        if sizes is None:
            return Mixture(self.shares, seed, shuffle).order(epoch)
        former = self._former(sizes, seed, shuffle)
        return self.mixture.renumbered(former.order(epoch), former)

    @property
    def sizes(self) -> list[int | None]:
        """Rows of each part; None for a stream."""
        return [share.rows for share in self.shares]

    def renumber(self, visits: Iterable[int], sizes: Sequence[int | None]) -> list[int]:
        """Visits as numbered when the parts had these sizes, as they are numbered now that rows have been added."""
        former = self._former(sizes, 0, False)
        found: list[int] = self.mixture.renumbered(np.fromiter(visits, np.int64), former).tolist()
        return found

    def _former(self, sizes: Sequence[int | None], seed: int, shuffle: bool) -> Mixture:
        shares = [replace(share, rows=rows) for share, rows in zip(self.shares, sizes, strict=False)]
        return Mixture(shares, seed, shuffle)

    @property
    def rows(self) -> Sequence[Row]:
        """All rows, by their number."""
        return _Rows(self)

    def row(self, visit: int) -> Row:
        """The row of a visit; RowError where it is a bad one that is read when it is asked for."""
        part, index, _ = self.mixture.split(visit)
        return self.parts[part][index]

    def name(self, visit: int) -> str:
        """Where the row of a visit stands."""
        try:
            return self.row(visit).source
        except RowError as error:
            return error.source

    @property
    def has_stream(self) -> bool:
        """Whether rows of a stream are among those of the source: then nobody knows how many there are."""
        return any(isinstance(part, RowStream) for part in self.parts)

    def forget(self, visits: Iterable[int]) -> None:
        """Of streams, keep only rows from the first of `visits` on: those still to come, and the next one."""
        if not self.has_stream:
            return
        with self._lock:
            for part, first in self._oldest(visits).items():
                stream, offset = self.parts[part], self.mixture.offsets[part]
                assert isinstance(stream, RowStream)
                stream.forget(first)
                for known in (self._bad, self._left_out):
                    for index in [k for k in known if offset <= k < offset + first]:
                        known.pop(index) if isinstance(known, dict) else known.discard(index)

    def stream_state(self, visits: Iterable[int]) -> dict[str, Any]:
        """Where streams have to go on from to read `visits`, as plain values; {} without streams."""
        oldest = self._oldest(visits) if self.has_stream else {}
        return {
            str(part): stream.state(oldest.get(part, stream.next))
            for part, stream in enumerate(self.parts)
            if isinstance(stream, RowStream)
        }

    def load_stream_state(self, state: dict[str, Any]) -> None:
        """Send the streams to a saved place."""
        for part, place in state.items():
            stream = self.parts[int(part)]
            assert isinstance(stream, RowStream)
            stream.load(place)

    def _oldest(self, visits: Iterable[int]) -> dict[int, int]:
        """Part -> the first place of a stream that is among the visits."""
        found: dict[int, int] = {}
        for visit in visits:
            part, index, _ = self.mixture.split(visit)
            if isinstance(self.parts[part], RowStream):
                found[part] = min(found.get(part, index), index)
        return found

    def _takes(self, row: Row, bundled: bool) -> bool:
        """Whether the model takes the row's media; of a file of the user's, a row that it can't take is a bad one."""
        foreign = row.media.difference(self.processor.modalities)
        if foreign and not bundled:
            self.settle(self._foreign(row))
        return not foreign

    def _foreign(self, row: Row) -> RowError:
        taken = self.processor.modalities
        foreign = " and ".join(sorted(row.media.difference(taken)))
        text = f"the row has {foreign}, but this model takes {', '.join(taken)}; leave it out."
        return RowError(row.source, "modality", text)

    def __len__(self) -> int:
        """Rows, bad ones that are not yet known to be bad included; with a stream, a number above them all."""
        return self.mixture.total

    def left_out(self) -> str:
        """How many rows were left out, by cause, in words."""
        return ", ".join(f"{count} {cause}" for cause, count in self.counts.items()) or "none left out"

    @property
    def variants(self) -> int:
        """In how many ways a row's sample is made, which epochs take in turn."""
        return (self.data.augment_variants or VARIANTS) if self.strength else 1

    def key(self, visit: int) -> int:
        """What a visit's sample and size are remembered under, below variants * len(self): variant * rows + row."""
        epoch, index = divmod(visit, len(self))
        return epoch % self.variants * len(self) + index

    def measure(self, visit: int) -> SampleSize | None:
        """The size of a visit's sample, without encoding it; None where only encoding tells.

        Raises:
            RowError: the row can't be used; `leave_out` says what becomes of it.
        """
        if self.strength:
            return None
        row, data = self._taken_row(visit), self.data
        decoder = HERE if row.trusted else self.decoder
        size = self.processor.measure(
            row, video_fps=data.video_fps, max_frames=data.max_frames, decoder=decoder
        )
        self._bad_since_good = 0
        if size is None or size.length <= self.limit:
            return size
        if data.overlong == "truncate_text":
            return None
        raise self._overlong(row.source, f"{size.length} tokens", RAISE_OR_DROP)

    def encode(self, visit: int) -> Sample:
        """The sample of row `visit % len(self)` in pass `visit // len(self)`.

        Epochs differ under data.augment (in one of data.augment_variants ways) and data.blank_answers alone.

        Raises:
            RowError: the row can't be used; `leave_out` says what becomes of it.
        """
        with self._lock:
            sample = self._remembered(self.key(visit))
        if not self.blank:
            return sample
        draw = Augment(0.0, (self.seed, *divmod(visit, len(self))))
        ids = draw.blank(sample.input_ids, sample.labels, self.processor.pad_id, self.blank)
        return replace(sample, input_ids=ids)

    def sample(self, visit: int) -> Sample | None:
        """As `encode`; None for a row that is left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        try:
            return self.encode(visit)
        except RowError as error:
            self.leave_out(visit, error)
            return None

    def prefetch(self, visits: Iterable[int]) -> None:
        """Let the decoder begin with visits whose samples will be asked for next, in this order."""
        if isinstance(self.decoder, Here):
            return
        with self._lock:
            rows = []
            for visit in visits:
                if self.key(visit) in self._cache:
                    continue
                with contextlib.suppress(RowError):  # which is settled when the sample is asked for
                    row = self.row(visit)
                    rows += [] if row.trusted else [row]
            self.decoder.begin(rows, self.data.video_fps, self.data.max_frames)

    def _remembered(self, key: int) -> Sample:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        variant, index = divmod(key, len(self))
        if index in self._bad:
            raise self._bad[index]
        augment = Augment(self.strength, (self.seed, variant, index)) if self.strength else None
        try:
            sample = self._encode(index, augment)
        except RowError as error:
            self._bad[index] = RowError(*error.args)  # without its traceback, which holds the media
            raise
        self._keep(key, sample)
        return sample

    def leave_out(self, visit: int, error: RowError) -> None:
        """`settle` what a visit's row has raised, once a row."""
        with self._lock:
            index = visit % len(self)
            if index not in self._left_out:
                self.settle(error)
                self._left_out.add(index)

    def settle(self, error: RowError) -> None:
        """Raise, or count and list, a bad row as data.on_error (of an over-long one data.overlong) says."""
        dropped = error.cause == "overlong" and self.data.overlong == "drop"
        if self.data.on_error == "raise" and not dropped:
            raise RowError(
                error.source,
                error.cause,
                f"{error.message} (data.on_error=skip leaves out and lists such rows.)",
            ) from error
        self._count(error)
        self._bad_since_good += 0 if dropped else 1
        if self._bad_since_good > BAD_IN_A_ROW and self.has_stream:
            raise UserError(f"{BAD_IN_A_ROW} rows one after the other are bad, the last: {error}")

    def _count(self, error: RowError) -> None:
        self.counts[error.cause] += 1
        if self._bad_rows is not None and error.source not in self._listed:
            self._listed.add(error.source)
            self._bad_rows.parent.mkdir(parents=True, exist_ok=True)
            entry = {"source": error.source, "cause": error.cause, "message": error.message}
            with contextlib.closing(Lines(self._bad_rows)) as file:
                file.write(json.dumps(entry, ensure_ascii=False))

    def _taken_row(self, visit: int) -> Row:
        """The row of a visit; RowError where it is bad, or has media that the model doesn't take."""
        self._tick()
        row = self.row(visit)
        if not row.media <= set(self.processor.modalities):
            raise self._foreign(row)
        return row

    def _encode(self, index: int, augment: Augment | None) -> Sample:
        data, row = self.data, self._taken_row(index)
        how: dict[str, Any] = {
            "video_fps": data.video_fps,
            "max_frames": data.max_frames,
            "labels": data.labels,
            "decoder": HERE if row.trusted else self.decoder,
        }
        sample = self.processor.encode(row, **how, augment=augment)
        if sample.length > self.limit and augment is not None:
            # A pause too much is no fault of the row's.
            sample = self.processor.encode(row, **how)
        self._bad_since_good = 0
        if sample.length <= self.limit:
            return sample
        if data.overlong == "truncate_text":
            return self._truncate(sample)
        raise self._too_long(sample, RAISE_OR_DROP)

    def _truncate(self, sample: Sample) -> Sample:
        kept, cut = sample.input_ids[: self.limit], sample.input_ids[self.limit :]
        if not self.processor.media_ids.isdisjoint(cut.tolist()):
            raise self._too_long(
                sample, "only text is ever cut, but media stand behind that point; raise packing.budget."
            )
        labels = sample.labels[: self.limit]
        weights = None if sample.weights is None else sample.weights[: self.limit].clone()
        if not (labels[1:] != IGNORE).any():
            raise self._too_long(sample, "cut there, no answer would be left to learn; raise packing.budget.")
        return replace(sample, input_ids=kept.clone(), labels=labels.clone(), weights=weights)

    def _too_long(self, sample: Sample, advice: str) -> RowError:
        media = sum(int((sample.input_ids == token).sum()) for token in self.processor.media_ids)
        return self._overlong(sample.source, f"{sample.length} tokens, {media} of them media,", advice)

    def _overlong(self, source: str, tokens: str, advice: str) -> RowError:
        limit = f"packing.budget {self.budget}" + (
            f" ({self.limit} aligned)" if self.limit != self.budget else ""
        )
        return RowError(source, "overlong", f"{tokens} are over {limit}; {advice}")

    def _keep(self, index: int, sample: Sample) -> None:
        self._cache[index] = sample
        self._cached_bytes += sample.nbytes
        while self._cached_bytes > self.data.cache_mb * 2**20 and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes


class _Rows(Sequence[Row]):
    """A source's rows as a sequence."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.source.row(index)


def _access(data: DataConfig, root: str | None, folder: Path) -> Access:
    """What rows may name, of an entry with a root or none, whose file lies in a folder."""
    chosen = root if root is not None else data.root
    place = folder if chosen is None else expanded(chosen)
    return Access(place, data.outside_root, data.urls)


def _listed(path: Path | None) -> set[str]:
    """Sources that the file lists already (a resumed run's)."""
    if path is None or not path.is_file():
        return set()
    found, written = set(), path.read_bytes()
    if written and not written.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in written.splitlines():
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # a line that a killed run has left half written
            found.add(str(json.loads(line)["source"]))
    return found
