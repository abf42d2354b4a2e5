"""`SampleSource`: rows to samples on demand, with a bounded cache and one place where bad rows are settled.

Costs: a row is encoded once while its sample stays in the cache (least recently used out first). Its size is found out
without encoding where texts and headers of files tell; `zoo.data.lengths` keeps it for good.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo.config.schema import DataConfig
from zoo.data.augment import Augment
from zoo.data.errors import RowError
from zoo.data.processor import Processor
from zoo.data.rows import Row, is_bundled, read_rows
from zoo.data.sample import IGNORE, Sample
from zoo.data.sizes import SampleSize
from zoo.errors import UserError

RAISE_OR_DROP = "raise packing.budget, or set data.overlong to drop or truncate_text."


class SampleSource:
    """Samples of a list of rows, by index.

    Bad rows follow `data.on_error`; a sample over the limit follows `data.overlong`: "error" makes it a bad row, "drop"
    leaves it out, "truncate_text" cuts trailing text (never a media token, never the last label: else a bad row).
    Whatever is left out is counted by cause in `counts` and listed in the `bad_rows` file.

    Args:
        rows: rows as `read_rows` gives them.
        processor: encodes a row.
        data: on_error, overlong, cache_mb, video_fps and max_frames are used.
        budget: packing.budget, the most tokens of a sample.
        align: multiple that a sample's length is padded to; it counts against the budget.
        bad_rows: JSONL that bad rows are appended to (source, cause, message), each once; None lists them nowhere.
            With several ranks, give it to one.
        augment: strength of random changes to the media, 0 to 1 (data.augment, for training rows).
        blank: share of answer tokens that are blanked in the input (data.blank_answers, for training rows).
        seed: what those follow from, beside epoch and row.
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
    ) -> None:
        self.rows = list(rows)
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
        self._bad: dict[int, RowError] = {}  # by index
        self._left_out: set[int] = set()  # indices that are counted
        self._cache: OrderedDict[int, Sample] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        specs: Iterable[str],
        processor: Processor,
        data: DataConfig,
        *,
        max_rows: int | None = None,
        **options: Any,
    ) -> SampleSource:
        """The samples of some files or bundled sets, one after the other.

        Of a bundled set, rows with media that the model doesn't take are passed over.

        Args:
            specs: as `read_rows` takes them.
            max_rows: use the first so many good rows only.
            options: budget, align, bad_rows, augment, blank and seed, as the class takes them.

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no such file, or no row is left.
        """
        specs = list(specs)
        source = cls([], processor, data, **options)
        for spec in specs:
            rows = read_rows(spec, on_bad=source.settle)
            source.rows += [row for row in rows if source._takes(row, is_bundled(spec))]
        source.rows = source.rows[:max_rows]
        if not source.rows:
            raise UserError(f"{', '.join(specs)}: no usable row ({source.left_out()}); see bad_rows.jsonl.")
        return source

    def _takes(self, row: Row, bundled: bool) -> bool:
        """Whether the model takes the row's media; of a file of the user's, a row that it can't take is a bad one."""
        taken = self.processor.modalities
        foreign = sorted(row.media.difference(taken))
        if foreign and not bundled:
            text = (
                f"the row has {' and '.join(foreign)}, but this model takes {', '.join(taken)}; leave it out."
            )
            self.settle(RowError(row.source, "modality", text))
        return not foreign

    def __len__(self) -> int:
        """Rows, bad ones that are not yet known to be bad included."""
        return len(self.rows)

    def left_out(self) -> str:
        """How many rows were left out, by cause, in words."""
        return ", ".join(f"{count} {cause}" for cause, count in self.counts.items()) or "none left out"

    @property
    def variants(self) -> int:
        """In how many ways a row's sample is made, which epochs take in turn."""
        return self.data.augment_variants if self.strength else 1

    def key(self, visit: int) -> int:
        """What a visit's sample and size are remembered under, below variants * len(self): variant * rows + row."""
        epoch, index = divmod(visit, len(self.rows))
        return epoch % self.variants * len(self.rows) + index

    def name(self, visit: int) -> str:
        """Where a visit's row stands."""
        return self.rows[visit % len(self.rows)].source

    def measure(self, visit: int) -> SampleSize:
        """The size of a visit's sample: from texts and headers where they tell, else by encoding it.

        Raises:
            RowError: the row can't be used; `leave_out` says what becomes of it.
        """
        row, data = self.rows[visit % len(self.rows)], self.data
        how: dict[str, Any] = {"video_fps": data.video_fps, "max_frames": data.max_frames}
        size = None if self.strength else self.processor.measure(row, **how)
        if size is None or (size.length > self.limit and data.overlong == "truncate_text"):
            return self.processor.size(self.encode(visit))
        if size.length > self.limit:
            raise self._overlong(row.source, f"{size.length} tokens", RAISE_OR_DROP)
        return size

    def encode(self, visit: int) -> Sample:
        """The sample of row `visit % len(self)` in epoch `visit // len(self)`.

        Epochs differ under data.augment (in one of data.augment_variants ways) and data.blank_answers alone.

        Raises:
            RowError: the row can't be used; `leave_out` says what becomes of it.
        """
        with self._lock:
            sample = self._remembered(self.key(visit))
        if not self.blank:
            return sample
        draw = Augment(0.0, (self.seed, *divmod(visit, len(self.rows))))
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

    def _remembered(self, key: int) -> Sample:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        variant, index = divmod(key, len(self.rows))
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
            index = visit % len(self.rows)
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
        self.counts[error.cause] += 1
        if self._bad_rows is not None and error.source not in self._listed:
            self._listed.add(error.source)
            self._bad_rows.parent.mkdir(parents=True, exist_ok=True)
            entry = {"source": error.source, "cause": error.cause, "message": error.message}
            with self._bad_rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _encode(self, index: int, augment: Augment | None) -> Sample:
        row, data = self.rows[index], self.data
        how: dict[str, Any] = {"video_fps": data.video_fps, "max_frames": data.max_frames}
        sample = self.processor.encode(row, **how, augment=augment)
        if sample.length > self.limit and augment is not None:
            # A pause too much is no fault of the row's.
            sample = self.processor.encode(row, **how)
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
        if not (labels[1:] != IGNORE).any():
            raise self._too_long(sample, "cut there, no answer would be left to learn; raise packing.budget.")
        return replace(sample, input_ids=kept.clone(), labels=labels.clone())

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


def _listed(path: Path | None) -> set[str]:
    """Sources that the file lists already (a resumed run's)."""
    if path is None or not path.is_file():
        return set()
    return {
        json.loads(line)["source"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    }
