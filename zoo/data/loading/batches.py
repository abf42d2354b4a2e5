"""From planned bins to micro-batches: encoding, with what it shows otherwise than planned, and collation."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.data.errors import RowError
from zoo.data.loading.lengths import Findings, Lengths
from zoo.data.sample import MicroBatch, Sample, collate, collate_padded
from zoo.packing import PackedLayout


def encode_all(lengths: Lengths, bins: Sequence[Sequence[int]]) -> tuple[list[list[Sample]], Findings]:
    """The samples of each bin, without those that can't be encoded, and what was found otherwise than measured."""
    samples: list[list[Sample]] = []
    found: Findings = {}
    for visits in bins:
        samples.append([])
        for visit in visits:
            try:
                sample = lengths.source.encode(visit)
            except RowError as error:
                found[visit] = RowError(*error.args)  # without its traceback, which holds the media
                continue
            samples[-1].append(sample)
            size = lengths.get(visit)
            if size is None or size[0] != sample.length:
                found[visit] = lengths.size_of(lengths.source.processor.size(sample))
    return samples, found


def make_batch(
    samples: Sequence[Sample], mode: str, align: int, pad_to: int | None, pad_id: int
) -> MicroBatch:
    """The micro-batch of some samples, in pinned memory where there is a GPU."""
    if mode == "thd":
        layout = PackedLayout.from_lengths([sample.length for sample in samples], align, pad_to)
        return collate(samples, layout, pad_id).pin()
    return collate_padded(samples, align, pad_to, pad_id).pin()
