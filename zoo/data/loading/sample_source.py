"""`SampleSource`: rows to samples on demand. It composes the rows, their encoder, random changes, a cache and bad rows.

Costs: a row is encoded once while its sample stays in the cache (least recently used out first). Its size is found
without encoding where its texts and the headers of its files suffice; `zoo.data.loading.lengths` keeps it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from zoo.config.entries import MEDIA_KEYS, parse_entry
from zoo.config.schema import DataConfig, EmbedConfig
from zoo.data.errors import RowError
from zoo.data.loading.bad_rows import BAD_IN_A_ROW, BadRows
from zoo.data.loading.defaults import VARIANTS
from zoo.data.loading.encoding_workers import EncodingWorkers, RowToEncode
from zoo.data.loading.pairs import answer_before, with_other_answer
from zoo.data.loading.row_encoder import LengthLimit, RowEncoder
from zoo.data.media.decoder import Decoder
from zoo.data.media.sizes import SampleSize
from zoo.data.processors.augment import AugmentPolicy
from zoo.data.processors.processor import Processor
from zoo.data.sample import Sample, TeacherLogits
from zoo.data.sources import identity
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.references import is_url
from zoo.data.sources.row_set import RowSet, check_modalities, open_rows
from zoo.data.sources.rows import Row
from zoo.errors import UserError


class TeacherTokens(Protocol):
    """Says what a teacher on disk makes of a sample, by its `SampleSource.digest`."""

    def find(self, digest: bytes, sample: Sample) -> TeacherLogits:
        """Its most likely tokens at each label; RowError where there are none."""


class SampleSource:
    """Samples by their id (see `zoo.data.sources.mixture`); `open` and `of_rows` put one together.

    Whatever is left out is counted by cause in `counts` and listed in the `bad_rows` file.
    """

    def __init__(
        self,
        rows: RowSet,
        encoder: RowEncoder,
        limit: LengthLimit,
        bad_rows: BadRows,
        augment: AugmentPolicy,
        cache_mb: float,
        tick: Callable[[], None],
        workers: int = 0,
    ) -> None:
        self.rows, self.encoder, self.limit = rows, encoder, limit
        self.bad_rows, self.augment = bad_rows, augment
        self.bad_rows.limit = BAD_IN_A_ROW if rows.has_stream else math.inf
        self.processor, self.decoder = encoder.processor, encoder.decoder
        self.variants = augment.variants  # in how many ways a row's sample is made, which its repeats take in turn
        self._rows = len(rows)
        self._cache = SampleCache(cache_mb)
        self._tick = tick
        self._lock = threading.RLock()
        self.workers = EncodingWorkers(workers, encoder, encoder.data.ahead_mb) if workers else None
        # (variants * rows, 2) float32: a reference model's log-probabilities of both samples of each pair, by `key`
        self.references: np.ndarray | None = None
        self.teacher: TeacherTokens | None = None  # gives samples what it says of them
        self.shrunk = 0  # rows whose media were made smaller (data.overlong=shrink)
        self._shrunk: dict[int, None] = {}  # their numbers; of streams those that are still to come

    @classmethod
    def open(
        cls,
        specs: Iterable[object],
        processor: Processor,
        data: DataConfig,
        *,
        max_rows: int | None = None,
        evaluation: bool = False,
        bad_rows: Path | None = None,
        **options: Any,
    ) -> SampleSource:
        """The samples of some entries of data.train or data.eval.

        Rows of a bundled set with media that the model doesn't take are skipped.

        Args:
            specs: entries as `zoo.config.entries.parse_entry` takes them: paths, mappings, rows as objects.
            processor, data, options: as `of_rows` takes them.
            max_rows: use the first so many rows only.
            evaluation: the entries are those of data.eval: of rows held out, those are taken.
            bad_rows: JSONL that bad rows are appended to; see `BadRows`.

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no such file, or no row is left.
        """
        key = "data.eval" if evaluation else "data.train"
        entries = [parse_entry(spec, key) for spec in specs]
        bad = BadRows(data, bad_rows)
        rows = open_rows(entries, data, processor.modalities, bad.handle, max_rows=max_rows, evaluation=evaluation)
        if not len(rows):
            names = ", ".join(rows.names)
            if not bad.counts and any(entry.held_out is not None for entry in entries):
                way = "give a larger held_out, or data.eval=none" if evaluation else "give a smaller held_out"
                raise UserError(f"{key}: no row of {names} is left by held_out; {way}.")
            raise UserError(f"{names}: no usable row ({bad.summary()}); see bad_rows.jsonl.")
        return cls.of_rows(rows, processor, data, bad_rows=bad, **options)

    @classmethod
    def of_rows(
        cls,
        rows: Iterable[Row],
        processor: Processor,
        data: DataConfig,
        *,
        budget: int,
        align: int = 1,
        bad_rows: BadRows | None = None,
        augment: float = 0.0,
        blank: float = 0.0,
        seed: int = 0,
        decoder: Decoder | None = None,
        workers: int = 0,
        tick: Callable[[], None] = lambda: None,
        pairs: bool = False,
        media_dtype: torch.dtype | None = None,
        labelled: bool = False,
        embed: EmbedConfig | None = None,
    ) -> SampleSource:
        """The samples of rows that are at hand.

        Args:
            rows: a `RowSet`, or rows as `read_rows` gives them.
            processor: encodes a row.
            data: on_error, overlong, labels, cache_mb, augment_variants and the limits of media are used.
            budget: packing.budget, the most tokens of a sample.
            align: multiple that a sample's length is padded to; it counts against the budget.
            bad_rows: decides about rows that can't be used.
            augment: strength of random changes to the media, 0 to 1 (data.augment, for training rows).
            blank: share of answer tokens that are blanked in the input (data.blank_answers, for training rows).
            seed: what those changes follow from, beside row and repeat.
            decoder: who decodes media; None: who does by `data`.
            workers: processes that make whole samples of rows with media; 0: none.
            tick: called for each row that is measured or encoded.
            pairs: rows are preference pairs, and a sample is both of their conversations.
            media_dtype: as `RowEncoder` has it.
            labelled: rows are answers with a label, and a sample brings its conversation with the answer of the row before it.
            embed: rows are queries with candidates, and a sample is all of them.

        Raises:
            ConfigError: limits of pixels, for a model whose processor has none.
        """
        rows = rows if isinstance(rows, RowSet) else RowSet([list(rows)], ["rows"])
        names = [name for name in MEDIA_KEYS if name.endswith("_pixels")]
        keys = [f"data.{name}" for name in names if getattr(data, name) is not None]
        for limits, part in zip(rows.limits, rows.names, strict=True):
            keys += [f"{name} of {part}" for name in names if limits is not None and name in limits.own]
        keys += ["data.overlong=shrink"] if data.overlong == "shrink" else []
        if keys:
            processor.check_pixels(keys)
        limit = LengthLimit(budget, align, data.overlong)
        variants = (data.augment_variants or VARIANTS) if augment else 1
        pair_align = align if pairs or embed is not None else None
        return cls(
            rows,
            RowEncoder(processor, data, decoder, limit.tokens, pair_align, media_dtype, labelled, embed),
            limit,
            bad_rows or BadRows(data),
            AugmentPolicy(augment, variants, blank, seed),
            data.cache_mb,
            tick,
            workers,
        )

    def __len__(self) -> int:
        """Number of rows, as `RowSet` counts them."""
        return len(self.rows)

    @property
    def counts(self) -> Counter[str]:
        """Rows that were left out, by cause."""
        return self.bad_rows.counts

    def key(self, sample_id: SampleId) -> SampleId:
        """The first sample id that has the same sample and size, below variants * len(self)."""
        repeat, row = divmod(sample_id, self._rows)
        return SampleId(repeat % self.variants * self._rows + row)

    def measure(self, sample_id: SampleId) -> SampleSize | None:
        """The size of a sample, without encoding it; None where only encoding gives it.

        Raises:
            RowError: the row can't be used; `leave_out` decides what becomes of it.
        """
        if self.augment.strength:
            return None
        row = self._read(sample_id)
        size = self.encoder.measure(row)
        if size is None:  # perhaps because a file is missing
            row.check_files()
        self.bad_rows.note_good()
        return self.limit.measured(size, row.source, row.limits)

    def encode(self, sample_id: SampleId) -> Sample:
        """The sample of row `sample_id % len(self)` in its repeat `sample_id // len(self)`.

        Repeats differ under data.augment (in one of data.augment_variants ways) and data.blank_answers alone.

        Raises:
            RowError: the row can't be used; `leave_out` decides what becomes of it.
        """
        with self._lock:
            sample = self._cached(self.key(sample_id))
        repeat, row = divmod(sample_id, len(self))
        if self.references is not None:
            chosen, rejected = self.references[self.key(sample_id)].tolist()
            sample = replace(sample, reference=(chosen, rejected))
        if self.teacher is not None:
            sample = replace(sample, taught=self.teacher.find(self.digest(sample_id), sample))
        return self.augment.blanked(sample, repeat, row, self.processor.pad_id)

    def digest(self, sample_id: SampleId) -> bytes:
        """16 bytes by which a row, its tokens and its labels are known, wherever it stands in the data."""
        with self._lock:
            sample = self._cached(self.key(sample_id))
        return identity.key_of(self._row(self.key(sample_id)), sample.input_ids.numpy(), sample.labels.numpy())

    def sample(self, sample_id: SampleId) -> Sample | None:
        """As `encode`; None for a row that is left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        try:
            return self.encode(sample_id)
        except RowError as error:
            self.leave_out(sample_id, error)
            return None

    def leave_out(self, sample_id: SampleId, error: RowError) -> None:
        """Raise, or count and list once, the error of a sample's row; see `BadRows.handle`."""
        with self._lock:
            self.bad_rows.leave_out(sample_id % len(self), error)

    def note_shrunk(self, sample_ids: Iterable[SampleId]) -> None:
        """Count rows whose media were made smaller, each once."""
        with self._lock:
            for sample_id in sample_ids:
                row = sample_id % len(self)
                self.shrunk += row not in self._shrunk
                self._shrunk[row] = None

    @property
    def shrunk_rows(self) -> Collection[int]:
        """Numbers of the rows whose media were made smaller."""
        return self._shrunk.keys()

    def sizes_follow_from(self) -> list[list[object]]:
        """What the sizes of each part's rows follow from beside the rows, as plain values for a checkpoint."""
        budget = self.limit.tokens if self.limit.overlong == "shrink" else None
        limits = [entry_limits or self.encoder.limits for entry_limits in self.rows.limits]
        return [
            [entry_limits.video_fps, entry_limits.max_frames, *astuple(entry_limits.pixels), budget]
            for entry_limits in limits
        ]

    def prefetch(self, ids: Iterable[SampleId], *, alone: bool = False) -> None:
        """Let workers begin with samples that will be asked for next, in this order.

        Decoding workers drop what was begun before. Encoding workers do under `alone`, and else go on with it afterwards.
        """
        if self.workers is None and not self.encoder.decodes_ahead:
            return
        with self._lock:
            rows, begun = [], []
            for key in dict.fromkeys(map(self.key, ids)):
                if key in self._cache:
                    continue
                with contextlib.suppress(RowError):  # raised again when the sample is asked for
                    row = self._row(key)
                    rejected = [row.rejected] if isinstance(row.rejected, Row) else []
                    parts = (row, *rejected, *row.candidates)
                    media = [medium for part in parts for medium in (*part.images, *part.videos, *part.audios)]
                    if self.workers is None or not media or any(map(is_url, media)):
                        rows.append(row)
                    else:
                        begun.append(RowToEncode(key, row, self.augment.media(*divmod(key, len(self)))))
            self.encoder.begin(rows)
            if self.workers is not None:
                self.workers.begin(begun, alone=alone)

    def abandon(self) -> None:
        """End the encoding workers, and have whoever encodes in another thread fail at the next row."""
        self._tick = _abandoned
        self.close()

    def close(self) -> None:
        """End the encoding workers."""
        if self.workers is not None:
            self.workers.close()

    def forget(self, wanted: Iterable[SampleId]) -> None:
        """Keep only rows of streams from the first of `wanted` on: those still to come, and the next one."""
        if self.rows.has_stream:
            with self._lock:
                for sample_id in self.rows.forget(wanted):
                    self.bad_rows.forget(sample_id)
                    for row in [row for row in self._shrunk if row in sample_id]:
                        del self._shrunk[row]

    def _cached(self, key: SampleId) -> Sample:
        """The sample of a key, encoded where it is not in the cache."""
        sample = self._cache.get(key)
        if sample is None:
            variant, row = divmod(key, len(self))
            self.bad_rows.refuse(row)
            try:
                sample = self._encode(variant, row)
            except RowError as error:
                self.bad_rows.remember(row, error)
                raise
            self._cache.put(key, sample)
        return sample

    def _encode(self, variant: int, number: int) -> Sample:
        row, augment = self._read(SampleId(number)), self.augment.media(variant, number)
        begun = self.workers.take(variant * len(self) + number) if self.workers is not None else None
        sample = self.encoder.encode(row, augment) if begun is None else begun
        if self.encoder.length(sample) > self.limit.tokens and augment is not None:
            sample = self.encoder.encode(row)  # a random pause too much is no fault of the row
        self.bad_rows.note_good()
        return self.limit.fitted(sample, self.processor.media_ids, row.limits)

    def _read(self, sample_id: SampleId) -> Row:
        """The row of a sample; RowError where it is bad, or has media that the model doesn't take."""
        self._tick()
        row = self._row(sample_id)
        check_modalities(row, self.processor.modalities)
        if self.encoder.pair_align is not None and isinstance(row.rejected, Row):
            check_modalities(row.rejected, self.processor.modalities)
        return row

    def _row(self, sample_id: SampleId) -> Row:
        row = self.rows.row(sample_id)
        if not self.encoder.labelled:
            return row
        return with_other_answer(row, answer_before(self.rows, sample_id % self._rows))


def _abandoned() -> None:
    raise RuntimeError("the run has ended, and its rows are no longer read")


class SampleCache:
    """Samples by their key, up to so many MiB of them; the least recently used ones leave first."""

    def __init__(self, megabytes: float) -> None:
        self._limit = megabytes * 2**20
        self._samples: OrderedDict[SampleId, Sample] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: SampleId) -> bool:
        return key in self._samples

    def get(self, key: SampleId) -> Sample | None:
        """The sample, or None where there is none."""
        if key not in self._samples:
            return None
        self._samples.move_to_end(key)
        return self._samples[key]

    def put(self, key: SampleId, sample: Sample) -> None:
        """Keep a sample, in the place of others where they take too much together."""
        self._samples[key] = sample
        self._bytes += sample.nbytes
        while self._bytes > self._limit and self._samples:
            _, dropped = self._samples.popitem(last=False)
            self._bytes -= dropped.nbytes

    def clear(self) -> None:
        """Drop all samples that are kept."""
        self._samples.clear()
        self._bytes = 0
