"""Packed rows as training gets them: what each token is, where samples begin and end, positions and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.loading.defaults import with_defaults
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.audio import SpeakingProcessor
from zoo.data.sample import IGNORE
from zoo.model.build import Assembly
from zoo.packing.spoken import ANSWERS, COUNTS, EOS, FRAMES
from zoo.planner.sample_costs import training_cost
from zoo.records import reading_back
from zoo.steps import StepRank
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zoo.data.processors.processor import Processor
    from zoo.data.sample import MicroBatch

MEDIA = ("image", "video", "audio")
KINDS = ("prompt", *MEDIA, "label", "padding")  # what a token is; a label has a loss
_LONGEST_TEXT = 2000  # characters of a span that are kept


@dataclass(frozen=True)
class Span:
    """Tokens one after the other that are of one kind, from `start` on."""

    kind: str
    start: int
    end: int
    text: str = ""  # what they say; empty for media and padding


@dataclass(frozen=True)
class SpokenAnswer:
    """An answer's codes, and the text that the talker reads with each frame."""

    codes: Tensor  # (F, codebooks) int64
    words: tuple[str, ...]  # one before the first frame and one a frame, "" where no text is left


@dataclass(frozen=True)
class Segment:
    """One sample in its row."""

    start: int
    end: int  # without its padding
    padded_end: int
    source: str  # file and line
    kind: str | None
    spans: tuple[Span, ...]
    speech: SpokenAnswer | None = None

    def tokens(self, kind: str) -> int:
        """How many of its tokens are of that kind."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)


@dataclass(frozen=True)
class PackedRow:
    """A row of the batch."""

    width: int  # tokens, padding included
    segments: tuple[Segment, ...]
    positions: Tensor  # (A, width) position ids, A axes
    note: str = ""  # what else is known of it

    @property
    def padding(self) -> int:
        """Tokens that are padding."""
        return self.width - sum(segment.end - segment.start for segment in self.segments)


def packed_rows(recipe: Recipe, assembly: Assembly, count: int, data: JsonObject | None = None) -> list[PackedRow]:
    """`count` rows of a validated recipe's training: the first ones, or those that follow a saved state of its data.

    Where train.epochs come to fewer, there are as many as these have.

    Raises:
        RowError, UserError: as in training, for rows that can't be used.
    """
    chosen = with_defaults(recipe.data)
    processor, align = assembly.processor, recipe.packing.align or 1
    source = SampleSource.open(
        chosen.train, processor, chosen, budget=recipe.packing.budget, align=align, augment=chosen.augment,
        blank=chosen.blank_answers, seed=recipe.run.seed, pairs=recipe.train.pairs,
    )  # fmt: skip
    cost = training_cost(assembly.config, recipe)
    loader = BatchLoader(source, recipe, align=align, cost=cost, prefetch=False)
    if data is not None:
        with reading_back("the data's position of the step", "take the file that the run wrote"):
            loader.load_state_dict(data)
    if recipe.train.steps is None and not source.rows.has_stream:
        loader.end_after(recipe.train.epochs or 1.0)
    step = assembly.family.load("step")(assembly.config, recipe.packing, StepRank(torch.device("cpu")))
    tokens = {name: getattr(assembly.config.root, f"{name}_token_id", None) for name in MEDIA}
    packed: list[PackedRow] = []
    while len(packed) < count and (batches := loader.next_step()):
        for batch in batches:
            if not batch.filler:
                packed += _rows_of(step.pack(batch, step.capture(batch)), batch, tokens, processor)
    return packed[:count]


def _rows_of(parts: Any, batch: MicroBatch, tokens: dict[str, int | None], processor: Processor) -> list[PackedRow]:
    """Rows of a micro-batch: one that is packed, or a padded one for each sample."""
    rows, spoken = [], batch.media.get(COUNTS)
    frames = () if spoken is None else batch.media[FRAMES].split(spoken.tolist())
    answers = [] if spoken is None else batch.media[ANSWERS].tolist()
    for row, ids in enumerate(parts.input_ids):
        padding, owner = parts.padding_mask[row], parts.segment_ids[row]
        classes = torch.zeros_like(ids)
        for number, name in enumerate(MEDIA, start=1):
            if tokens[name] is not None:
                classes[ids == tokens[name]] = number
        classes[parts.labels[row] != IGNORE] = KINDS.index("label")
        classes[padding] = KINDS.index("padding")
        segments, starts = [], []
        for number in owner[owner >= 0].unique().tolist():
            tokens_of_sample = (owner == number).nonzero().flatten()
            start, end = int(tokens_of_sample[0]), int(tokens_of_sample[-1]) + 1
            starts.append(start)
            spans = tuple(_spans(classes, ids, start, end, processor.tokenizer))
            speech = None
            if len(frames) == len(batch.lengths):
                speech = _speech(ids[start:end], frames[number], answers[number], processor)
            segments.append(Segment(start, end, end, batch.sources[number], batch.kinds[number], spans, speech))
        ends = [*starts[1:], len(ids)]
        segments = [replace(segment, padded_end=end) for segment, end in zip(segments, ends, strict=True)]
        rows.append(PackedRow(len(ids), tuple(segments), parts.positions[:, row]))
    return rows


def _spans(classes: Tensor, ids: Tensor, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Runs of tokens of the same kind between `start` and `end`."""
    changes = (classes[start + 1 : end] != classes[start : end - 1]).nonzero().flatten() + start + 1
    edges = [start, *changes.tolist(), end]
    spans = []
    for first, last in pairwise(edges):
        kind = KINDS[int(classes[first])]
        text = "" if kind in (*MEDIA, "padding") else tokenizer.decode(ids[first:last].tolist())
        spans.append(Span(kind, first, last, text[:_LONGEST_TEXT]))
    return spans


def _speech(ids: Tensor, codes: Tensor, answer: Sequence[int], processor: Processor) -> SpokenAnswer:
    """What the talker says of a sample's tokens (L,), and reads with each frame; `answer`: the first place of the answer, and behind its last."""
    assert isinstance(processor, SpeakingProcessor) and processor.speech is not None
    tokens = processor.speech.tokens.row(ids, codes, (answer[0], answer[1]), 0).text[-len(codes) - 1 :].tolist()
    words = (processor.tokenizer.decode([int(ids[token])]) if token >= 0 else "" for token in tokens)
    return SpokenAnswer(
        codes, tuple("end" if token == EOS else word for word, token in zip(words, tokens, strict=True))
    )
