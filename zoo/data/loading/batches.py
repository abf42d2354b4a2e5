"""From planned bins to micro-batches: encoding, with what differs from the plan, and collation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zoo.data.errors import RowError
from zoo.data.loading.lengths import Findings, Lengths
from zoo.data.sample import (
    MicroBatch,
    Sample,
    collate,
    collate_padded,
    with_preferences,
    with_retrieval,
    with_teacher_logits,
)
from zoo.data.sources.mixture import SampleId
from zoo.packing import PackedLayout


class EncodedBins(NamedTuple):
    """The samples of some bins."""

    bins: list[list[Sample]]  # without those that can't be encoded
    findings: Findings  # of samples that differ from what was measured


def encode_all(lengths: Lengths, bins: Sequence[Sequence[SampleId]]) -> EncodedBins:
    """Encode the samples of each bin."""
    encoded = EncodedBins([], {})
    for ids in bins:
        encoded.bins.append([])
        for sample_id in ids:
            try:
                sample = lengths.source.encode(sample_id)
            except RowError as error:
                encoded.findings[sample_id] = error.bare()
                continue
            encoded.bins[-1].append(sample)
            size = lengths.get(sample_id)
            if size is None or size.tokens != lengths.source.encoder.length(sample):
                encoded.findings[sample_id] = lengths.size_of(lengths.source.encoder.size(sample))
    return encoded


def make_batch(samples: Sequence[Sample], mode: str, align: int, pad_to: int | None, pad_id: int) -> MicroBatch:
    """The micro-batch of some samples, in pinned memory where there is a GPU."""
    segments, pinned = [segment for sample in samples for segment in sample.segments], torch.cuda.is_available()
    others = [sample.mismatched for sample in samples if sample.mismatched is not None]
    if mode == "thd":
        layout = PackedLayout.from_lengths([segment.length for segment in segments], align, pad_to)
        batch = collate(segments, layout, pad_id, pinned=pinned)
    else:
        batch = collate_padded(segments, align, pad_to, pad_id, pinned=pinned)
    if others:
        batch = replace(batch, mismatched=make_batch(others, mode, align, pad_to, pad_id))
    batch = with_retrieval(with_preferences(batch, samples), samples)
    return with_teacher_logits(batch, samples).pin()


def with_most_tokens(batches: Sequence[MicroBatch], totals: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """A step's micro-batches of this rank, each with its `most_tokens`; `totals`: `MicroBatch.total` of every rank's, in their order."""
    most = [max(at_once) for at_once in zip(*totals, strict=True)]
    return [replace(batch, most_tokens=tokens) for batch, tokens in zip(batches, most, strict=True)]
