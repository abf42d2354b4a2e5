"""`RowEncoder`: a row to its sample or its size, under a recipe's settings; `LengthLimit`: which samples are too long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.media.decoder import HERE, Decoder, Here
from zoo.data.media.sizes import SampleSize
from zoo.data.processors.augment import Augment
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.rows import Row

RAISE_OR_DROP = "raise packing.budget, or set data.overlong to drop or truncate_text."


@dataclass(frozen=True)
class LengthLimit:
    """The most tokens of a sample, and what is done with longer ones.

    Attributes:
        budget: packing.budget.
        align: multiple that a sample's length is padded to; it counts against the budget.
        overlong: data.overlong: "truncate_text" cuts trailing text (never a media token, never the last label); under
            "error" and "drop" a longer sample is a bad row.
    """

    budget: int
    align: int = 1
    overlong: str = "error"

    @property
    def tokens(self) -> int:
        """The most tokens of a sample."""
        return self.budget // self.align * self.align

    def measured(self, size: SampleSize | None, source: str) -> SampleSize | None:
        """A row's size; None where it is not known, or where only encoding shows how much is cut.

        Raises:
            RowError: the row is too long ("overlong").
        """
        if size is None or size.length <= self.tokens:
            return size
        if self.overlong == "truncate_text":
            return None
        raise self._error(source, f"{size.length} tokens", RAISE_OR_DROP)

    def fitted(self, sample: Sample, media_ids: Collection[int]) -> Sample:
        """The sample, cut where it is too long.

        Args:
            sample: an encoded row.
            media_ids: ids of tokens that are never cut.

        Raises:
            RowError: the sample is too long and can't be cut ("overlong").
        """
        if sample.length <= self.tokens:
            return sample
        media = sum(int((sample.input_ids == token).sum()) for token in media_ids)
        tokens = f"{sample.length} tokens ({media} of media)"
        if self.overlong != "truncate_text":
            raise self._error(sample.source, tokens, RAISE_OR_DROP)
        kept, cut = sample.input_ids[: self.tokens], sample.input_ids[self.tokens :]
        if not set(media_ids).isdisjoint(cut.tolist()):
            advice = "only text is ever cut, but media stand behind that point; raise packing.budget."
            raise self._error(sample.source, tokens, advice)
        labels = sample.labels[: self.tokens]
        weights = None if sample.weights is None else sample.weights[: self.tokens].clone()
        if not (labels[1:] != IGNORE).any():
            advice = "cut there, no answer would be left to learn; raise packing.budget."
            raise self._error(sample.source, tokens, advice)
        return replace(sample, input_ids=kept.clone(), labels=labels.clone(), weights=weights)

    def _error(self, source: str, tokens: str, advice: str) -> RowError:
        aligned = f" ({self.tokens} aligned)" if self.tokens != self.budget else ""
        return RowError(
            source, "overlong", f"{tokens} are over packing.budget {self.budget}{aligned}; {advice}"
        )


@dataclass(frozen=True)
class RowEncoder:
    """Encodes and measures rows by a processor.

    Attributes:
        processor: encodes a row.
        data: labels, video_fps and max_frames are used.
        decoder: who decodes media. Those of zoo's own sets are decoded in this process.
    """

    processor: Processor
    data: DataConfig
    decoder: Decoder = HERE

    def measure(self, row: Row) -> SampleSize | None:
        """What `Processor.measure` says."""
        data, decoder = self.data, self._decoder(row)
        return self.processor.measure(
            row, video_fps=data.video_fps, max_frames=data.max_frames, decoder=decoder
        )

    def encode(self, row: Row, augment: Augment | None = None) -> Sample:
        """What `Processor.encode` says."""
        return self.processor.encode(
            row,
            video_fps=self.data.video_fps,
            max_frames=self.data.max_frames,
            labels=self.data.labels,
            decoder=self._decoder(row),
            augment=augment,
        )

    @property
    def decodes_ahead(self) -> bool:
        """Whether `begin` does anything."""
        return not isinstance(self.decoder, Here)

    def begin(self, rows: Sequence[Row]) -> None:
        """Let the decoder begin with rows that will be encoded soon, in this order."""
        untrusted = [row for row in rows if not row.trusted]
        self.decoder.begin(untrusted, self.data.video_fps, self.data.max_frames)

    def _decoder(self, row: Row) -> Decoder:
        return HERE if row.trusted else self.decoder
