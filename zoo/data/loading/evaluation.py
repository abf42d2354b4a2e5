"""`eval_batches`: micro-batches that hold every row of an evaluation set once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from zoo.data.errors import RowError
from zoo.data.loading.batches import encode_all, make_batch
from zoo.data.loading.lengths import Findings, Lengths, RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import MicroBatch, Sample
from zoo.data.sources.mixture import SampleId
from zoo.errors import UserError
from zoo.packing import plan_bins


class EvalBatches:
    """This rank's share of an evaluation set, each row once; see `eval_batches`.

    `bins` are the samples of each forward pass. Those that can't be encoded are taken out as they are met, and counted on
    every rank at the end of a pass.
    """

    def __init__(self, lengths: Lengths, bins: list[list[SampleId]], mode: str, align: int, pad_to: int | None) -> None:
        self.source, self.bins = lengths.source, bins
        self._lengths, self._mode, self._align, self._pad_to = lengths, mode, align, pad_to

    def __len__(self) -> int:
        """Forward passes of this rank, the empty ones included: the same on every rank."""
        return len(self.bins)

    def __iter__(self) -> Iterator[MicroBatch | None]:
        """The micro-batches, each prepared in a thread while the one before is used; None where this rank has no rows left and others do."""
        all_findings: Findings = {}
        with ThreadPoolExecutor(1, "zoo-eval") as thread:
            ahead = [thread.submit(self._prepared, ids) for ids in self.bins[:1]]
            for index, ids in enumerate(self.bins):
                batch, findings = ahead.pop().result()
                ahead = [thread.submit(self._prepared, ids) for ids in self.bins[index + 1 : index + 2]]
                for sample_id, finding in findings.items():
                    if isinstance(finding, RowError):
                        self.source.leave_out(sample_id, finding)
                        ids.remove(sample_id)
                all_findings |= findings
                yield batch
        for sample_id in self._lengths.exchange(all_findings, None, lambda _: None)[0]:
            self._lengths.get(sample_id)

    def _prepared(self, ids: list[SampleId]) -> tuple[MicroBatch | None, Findings]:
        (samples,), findings = encode_all(self._lengths, [ids])
        return self._batch(samples) if samples else None, findings

    def filler(self) -> MicroBatch:
        """A micro-batch to run, not to count, where this rank has none left."""
        for sample_id in map(SampleId, range(len(self.source))):
            (samples,), _ = encode_all(self._lengths, [[sample_id]])
            if samples:
                return self._batch(samples)
        raise UserError(f"data.eval: no row can be used ({self.source.bad_rows.summary()}); see bad_rows.jsonl.")

    def _batch(self, samples: list[Sample]) -> MicroBatch:
        return make_batch(samples, self._mode, self._align, self._pad_to, self.source.processor.pad_id)


def eval_batches(
    source: SampleSource,
    *,
    mode: str = "thd",
    budget: int,
    micro_batch: int = 1,
    align: int = 1,
    pad_to: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
    lookahead: int = 64,
    cost: Callable[[SampleSize], int] | None = None,
    group: RankGroup | None = None,
    every_variant: bool = False,
    rows: Iterable[int] | None = None,
) -> EvalBatches:
    """Micro-batches that hold every usable row of the source once over all ranks; measures all rows to plan them.

    Args:
        source, align, dp_rank, dp_size, cost, group: as `BatchLoader` takes them.
        mode, budget, micro_batch, lookahead: as `BinStream` takes them.
        pad_to: static row length, or None.
        every_variant: each usable row in each way that its sample is made (data.augment_variants).
        rows: numbers of those that are wanted, all of which may be unusable; None: all rows.

    Returns:
        A sized iterable, of the same length on every rank: a rank with fewer bins gets None at the end, for which the
        caller runs its `filler()` to keep collectives in step.

    Raises:
        UserError: no row of the source can be used.
    """
    lengths, count = Lengths(source, cost, group), len(source) * (source.variants if every_variant else 1)
    everything = list(map(SampleId, range(count) if rows is None else rows))
    lengths.ahead(everything)
    sizes = {sample_id: size for sample_id in everything if (size := lengths.get(sample_id)) is not None}
    ids = list(sizes)
    if not ids and rows is None:
        raise UserError(f"data.eval: no row can be used ({source.bad_rows.summary()}); see bad_rows.jsonl.")
    if mode == "thd":
        tokens, costs = [size.tokens for size in sizes.values()], [size.cost for size in sizes.values()]
        plan = plan_bins(tokens, budget, align, lookahead, costs)
        bins = [[ids[position] for position in positions] for positions in plan]
    else:
        bins = [ids[start : start + micro_batch] for start in range(0, len(ids), micro_batch)]
    bins += [[] for _ in range(-len(bins) % dp_size)]
    return EvalBatches(lengths, bins[dp_rank::dp_size], mode, align, pad_to)
