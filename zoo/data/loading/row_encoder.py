"""`RowEncoder`: a row to its sample or its size, under a recipe's settings; `LengthLimit`: which samples are too long."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from zoo.config.entries import MediaLimits
from zoo.config.schema import DataConfig, EmbedConfig
from zoo.data.errors import RowError
from zoo.data.loading import pairs
from zoo.data.media.decoder import Decoder
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.media.sizes import Fit, SampleSize
from zoo.data.processors.augment import Augment
from zoo.data.processors.fitting import Overlong
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.rows import Row

WAYS = "raise packing.budget, or set data.overlong to drop or truncate_text."


@dataclass(frozen=True)
class LengthLimit:
    """The most tokens of a sample, and what is done with longer ones.

    Attributes:
        budget: packing.budget.
        align: multiple that a sample's length is padded to; it counts against the budget.
        overlong: data.overlong: "truncate_text" cuts trailing text (never a media token, never the last label); under
            "error", "drop" and "shrink" a longer sample is a bad row (images and videos were made smaller before).
    """

    budget: int
    align: int = 1
    overlong: str = "error"

    @property
    def tokens(self) -> int:
        """The most tokens of a sample."""
        return self.budget // self.align * self.align

    def measured(self, size: SampleSize | None, source: str, limits: MediaLimits | None = None) -> SampleSize | None:
        """A row's size; None where it is not known, or where only encoding shows how much is cut.

        `limits`: of the row's media, where its entry has its own.

        Raises:
            RowError: the row is too long ("overlong").
        """
        if size is None or size.length <= self.tokens:
            return size
        if self.overlong == "truncate_text":
            return None
        raise self._error(source, f"{size.length} tokens", self._ways(size.fit, limits))

    def fitted(self, sample: Sample, media_ids: Collection[int], limits: MediaLimits | None = None) -> Sample:
        """The sample, cut where it is too long; `media_ids` are never cut, and `limits` are those of `measured`.

        Raises:
            RowError: the sample is too long and can't be cut ("overlong").
        """
        if sample.mismatched is not None or len(sample.segments) > 1:
            length = sample_length(sample, self.align)
            if length > self.tokens:
                kind = "a query and its candidates" if sample.candidates else "a pair"
                kind = kind if sample.mismatched is None else "a labelled or mismatched answer"
                raise self._error(sample.source, f"{length} tokens of {kind}", WAYS)
            return sample
        if sample.length <= self.tokens:
            return sample
        media = sum(int((sample.input_ids == token).sum()) for token in media_ids)
        tokens = f"{sample.length} tokens ({media} of media)"
        if self.overlong != "truncate_text":
            raise self._error(sample.source, tokens, self._ways(sample.fit, limits))
        ids, labels = sample.input_ids[: self.tokens], sample.labels[: self.tokens]
        if not set(media_ids).isdisjoint(sample.input_ids[self.tokens :].tolist()):
            advice = "only text is ever cut, but media stand behind that point; raise packing.budget."
            raise self._error(sample.source, tokens, advice)
        if not (labels[1:] != IGNORE).any():
            advice = "cut there, no answer would be left to learn; raise packing.budget."
            raise self._error(sample.source, tokens, advice)
        weights = None if sample.weights is None else sample.weights[: self.tokens].clone()
        return replace(sample, input_ids=ids.clone(), labels=labels.clone(), weights=weights)

    def _ways(self, fit: Fit | None, limits: MediaLimits | None) -> str:
        """What to do about a row that is too long, with the pixels under which it would fit."""
        if self.overlong == "shrink":
            small = "no images or videos of it can be made smaller, or are small enough at data.min_pixels"
            return f"{small} (by default the processor's least); {WAYS}"
        if fit is None:
            return WAYS
        values = {"max_pixels": fit.pixels.most, "video_max_pixels": fit.pixels.video_most}
        keys = {limits.key(name) if limits else f"data.{name}": value for name, value in values.items()}
        settings = " and ".join(f"{key}={value}" for key, value in keys.items() if value is not None)
        return f"{settings} would make it fit, and data.overlong=shrink does that for such rows alone; else {WAYS}"

    def _error(self, source: str, tokens: str, advice: str) -> RowError:
        aligned = f" ({self.tokens} aligned)" if self.tokens != self.budget else ""
        return RowError(source, "overlong", f"{tokens} are over packing.budget {self.budget}{aligned}; {advice}")


def sample_length(sample: Sample, align: int) -> int:
    """Tokens of an encoded sample: of a pair or of a query and its candidates with the padding of all, of a labelled answer the longer conversation's."""
    if sample.mismatched is not None:
        return max(sample.length, sample.mismatched.length)
    if len(sample.segments) == 1:
        return sample.length
    return sum(-(-segment.length // align) * align for segment in sample.segments)


@dataclass(frozen=True)
class RowEncoder:
    """Encodes and measures rows by a processor.

    Attributes:
        processor: encodes a row.
        data: labels, overlong and the limits of media are used; rows with limits of their own have those.
        decoder: who decodes media; None: who does by `data`, in the process that encodes.
        budget: the most tokens of a sample; None: any number.
        pair_align: rows are preference pairs, or queries with candidates, and all of their samples are padded to a multiple of this; None:
            rows are not, and of those that have a rejected answer the other one is learnt.
        media_dtype: dtype of what towers read, float32 tensors of two dims or more: they cast it first of all, and here it
            is less to copy. None: as the processor gives it.
        labelled: rows are answers with a label, as `zoo.data.loading.pairs.with_other_answer` gives them.
        embed: rows are queries with candidates, written as this says; None: they are not.
    """

    processor: Processor
    data: DataConfig
    decoder: Decoder | None = None
    budget: int | None = None
    pair_align: int | None = None
    media_dtype: torch.dtype | None = None
    labelled: bool = False
    embed: EmbedConfig | None = None

    def measure(self, row: Row) -> SampleSize | None:
        """The size by `Processor.measure`; of a pair, of both together."""
        if self.labelled:
            matched, mismatched = (self._measure(conversation) for conversation in pairs.labelled_rows_of(row))
            return None if matched is None or mismatched is None else pairs.labelled_size(matched, mismatched)
        if self.pair_align is None:
            return self._measure(row)
        sizes = [self._measure(conversation) for conversation in self._segments(row)]
        known = [size for size in sizes if size is not None]
        return pairs.joined_size(known, self.pair_align) if len(known) == len(sizes) else None

    def _segments(self, row: Row) -> Sequence[Row]:
        """The conversations of a row that lie in one sample."""
        return pairs.rows_of(row) if self.embed is None else pairs.conversations_of(row, self.embed)

    def encode(self, row: Row, augment: Augment | None = None) -> Sample:
        """The sample by `Processor.encode`; both samples of a pair get the same random changes."""
        if self.pair_align is None and not self.labelled:
            return self._encode(row, augment)
        again = copy.deepcopy(augment)
        if self.labelled:
            matched, mismatched = pairs.labelled_rows_of(row)
            samples = self._encode(matched, augment), self._encode(mismatched, again)
            return pairs.labelled(*samples, desirable=bool(row.label))
        if self.embed is not None:
            return pairs.retrieved([self._encode(part, copy.deepcopy(augment)) for part in self._segments(row)])
        chosen, rejected = pairs.rows_of(row)
        return pairs.joined(self._encode(chosen, augment), self._encode(rejected, again))

    def size(self, sample: Sample) -> SampleSize:
        """The size of an encoded sample."""
        if sample.mismatched is not None:
            return pairs.labelled_size(self.processor.size(sample), self.processor.size(sample.mismatched))
        sizes = [self.processor.size(segment) for segment in sample.segments]
        return sizes[0] if len(sizes) == 1 else pairs.joined_size(sizes, self.pair_align or 1)

    def length(self, sample: Sample) -> int:
        """Tokens that an encoded sample takes; of a pair with the padding of both."""
        return sample_length(sample, self.pair_align or 1)

    def _measure(self, row: Row) -> SampleSize | None:
        return self.processor.measure(row, decoder=self._decoder(), **self._media_options(row))

    def _encode(self, row: Row, augment: Augment | None) -> Sample:
        sample = self.processor.encode(
            row, labels=self.data.labels, decoder=self._decoder(), augment=augment, **self._media_options(row)
        )
        if self.media_dtype is None:
            return sample
        read = {name: x for name, x in sample.media.items() if x.dtype == torch.float32 and x.dim() > 1}
        return replace(sample, media=sample.media | {name: x.to(self.media_dtype) for name, x in read.items()})

    @cached_property
    def limits(self) -> MediaLimits:
        """How the media are taken of rows without limits of their own."""
        return MediaLimits.from_data(self.data)

    def _media_options(self, row: Row) -> dict[str, Any]:
        limits = row.limits or self.limits
        return {
            "video_fps": limits.video_fps,
            "max_frames": limits.max_frames,
            "pixels": limits.pixels,
            "overlong": None if self.budget is None else Overlong(self.budget, self.data.overlong == "shrink"),
        }

    @property
    def decodes_ahead(self) -> bool:
        """Whether `begin` does anything."""
        return self._decoder().decodes_ahead

    def begin(self, rows: Sequence[Row]) -> None:
        """Let the decoder begin with rows that will be encoded soon, in this order."""
        self._decoder().begin(rows, self.data.video_fps, self.data.max_frames)

    def _decoder(self) -> Decoder:
        return self.decoder or decoder_for(self.data)
