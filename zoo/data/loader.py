"""`BatchLoader`: the endless, resumable stream of optimizer steps; `eval_batches`: every row once.

Guarantees:
- The bins of a step don't depend on the number of data-parallel ranks: rank r takes bins i with i % dp_size == r.
- Within an epoch every usable row goes into the stream once; the packer's look-ahead runs on over the epochs' ends.
- `state_dict` belongs to the batches handed out, not to those prepared ahead: a resumed stream equals the
  uninterrupted one, to the sample.

Costs: each rank encodes every row once to learn its length (lengths are kept), and its own rows again when they have
left the cache (`data.cache_mb`). One step is prepared ahead in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from zoo.config.schema import Recipe
from zoo.data.sample import MicroBatch, Sample, collate, collate_padded
from zoo.data.source import SampleSource
from zoo.errors import ConfigError, UserError
from zoo.packing import BinPacker, PackedLayout, plan_bins

__all__ = ["BatchLoader", "EvalBatches", "SampleSource", "eval_batches"]

LENGTH_PROBES = 512  # rows whose lengths stand for all when the steps of an epoch are estimated


class BinStream:
    """The endless stream of bins (lists of visits to rows): epochs of a source, packed or in groups.

    Args:
        source: gives lengths, and None for rows that are left out.
        mode: "thd" fills bins to a token budget, "none" makes groups of `micro_batch` rows.
        budget: tokens of a bin (thd).
        align: multiple that lengths count up to (thd).
        lookahead: rows the packer may choose from (thd).
        micro_batch: rows of a bin (none).
        shuffle: a new order each epoch, from (seed, epoch).
        seed: run.seed.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        mode: str,
        budget: int,
        align: int,
        lookahead: int,
        micro_batch: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.source = source
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.seed = seed
        self.packer = BinPacker[int](budget, align, lookahead) if mode == "thd" else None
        self.epoch = 0
        self.cursor = 0  # rows of this epoch's order that were read
        self._order = self._make_order()

    def next_bin(self) -> list[int]:
        """Visits of the next bin, in order."""
        if self.packer is None:
            return [self._next_row()[0] for _ in range(self.micro_batch)]
        while not self.packer.ready():
            self.packer.add(*self._next_row())
        return self.packer.pop()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain values."""
        packer = None if self.packer is None else self.packer.state_dict()
        streams = self.source.stream_state(self._wanted())
        return {"epoch": self.epoch, "cursor": self.cursor, "packer": packer, "streams": streams}

    def forget(self) -> None:
        """Let go of rows of streams that are in bins already."""
        self.source.forget(self._wanted())

    def _wanted(self) -> list[int]:
        """Visits that are to come, those of this epoch and those that the packer holds."""
        if not self.source.has_stream:
            return []
        held = [] if self.packer is None else [visit for visit, _ in self.packer.state_dict()["items"]]
        return [*held, *self._order[self.cursor :].tolist()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._make_order()
        self.source.load_stream_state(state.get("streams", {}))
        if self.packer is not None and state["packer"] is not None:
            self.packer.load_state_dict(state["packer"])

    def _next_row(self) -> tuple[int, int]:
        """The next usable visit (see `SampleSource.sample`) and its length."""
        for _ in range(2 * len(self.source) + 1):
            while self.cursor == len(self._order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._make_order()
            visit = int(self._order[self.cursor])
            self.cursor += 1
            length = self.source.length(visit)
            if length is not None:
                return visit, length
        raise UserError(f"data.train: no usable row is left ({self.source.left_out()}); see bad_rows.jsonl.")

    def _make_order(self) -> np.ndarray:
        return self.source.order(self.epoch, self.seed, self.shuffle)


class BatchLoader:
    """Micro-batches of this rank, one optimizer step after the other, without end.

    Args:
        source: samples; the same rows in the same order on every rank.
        recipe: its packing, data.shuffle, data.lookahead, train.global_batch, train.micro_batch and run.seed are used.
        align: multiple each sample is padded to (thd), or the width of the batch (none).
        dp_rank: this rank's place among the data-parallel ones.
        dp_size: how many those are.
        prefetch: prepare the next step in a thread.

    Raises:
        ConfigError: train.global_batch does not divide by micro_batch * dp_size.
    """

    def __init__(
        self,
        source: SampleSource,
        recipe: Recipe,
        *,
        align: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        prefetch: bool = True,
    ) -> None:
        packing, train = recipe.packing, recipe.train
        rows_per_bin = 1 if packing.mode == "thd" else train.micro_batch
        unit = rows_per_bin * dp_size
        if train.global_batch % unit:
            raise ConfigError(
                f"train.global_batch is {train.global_batch}, not a multiple of {unit} (micro_batch x data-parallel "
                f"ranks); use {-(-train.global_batch // unit) * unit}."
            )
        if packing.pad_to is not None and packing.pad_to < packing.budget:
            raise ConfigError(
                f"packing.pad_to is {packing.pad_to}, under packing.budget {packing.budget}; set both to the same."
            )
        self.source = source
        self.bins_per_step = train.global_batch // rows_per_bin
        self.step = 0
        self._align, self._rank, self._ranks = align, dp_rank, dp_size
        self._mode, self._pad_to = packing.mode, packing.pad_to
        self._budget, self._lookahead = packing.budget, recipe.data.lookahead
        self._rows_per_bin = rows_per_bin
        self._stream = BinStream(
            source,
            mode=packing.mode,
            budget=packing.budget,
            align=align,
            lookahead=recipe.data.lookahead,
            micro_batch=train.micro_batch,
            shuffle=recipe.data.shuffle,
            seed=recipe.run.seed,
        )
        self._state = self._stream.state_dict()
        self._executor = ThreadPoolExecutor(1, "zoo-data") if prefetch else None
        self._ahead: Future[tuple[list[MicroBatch], dict[str, Any]]] | None = None

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next optimizer step (in pinned memory where there is a GPU).

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no usable row is left.
        """
        batches, state = self._ahead.result() if self._ahead is not None else self._produce()
        self._state, self.step = state, self.step + 1
        self._ahead = None if self._executor is None else self._executor.submit(self._produce)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which another loader goes on behind the last step handed out; the same on every rank."""
        return {"step": self.step, "rows": len(self.source), "seed": self._stream.seed, **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ConfigError: the data or the seed are not those of the saved run.
        """
        if (state["rows"], state["seed"]) != (len(self.source), self._stream.seed):
            raise ConfigError(
                f"The checkpoint's data had {state['rows']} rows and run.seed {state['seed']}; now there are "
                f"{len(self.source)} rows and seed {self._stream.seed}. Resume with the same, or use a new run.dir."
            )
        if self._ahead is not None:
            self._ahead.exception()  # wait: the thread moves the stream
            self._ahead = None
        self._stream.load_state_dict(state)
        self.step, self._state = state["step"], self._stream.state_dict()

    def steps_for_epochs(self, epochs: float) -> int:
        """About how many steps so many passes over the rows take, from the lengths of up to LENGTH_PROBES rows."""
        if self.source.has_stream:
            raise UserError("train.epochs: a stream of data.train has no end; give train.steps instead.")
        visits = self.source.order(0, self._stream.seed, shuffle=False)
        count = len(visits)
        probes = np.unique(np.linspace(0, count - 1, min(count, LENGTH_PROBES)).round().astype(int))
        lengths = [
            length for probe in probes if (length := self.source.length(int(visits[probe]))) is not None
        ]
        if self._mode == "thd":
            bins: float = sum(1 for _ in plan_bins(lengths, self._budget, self._align, self._lookahead))
        else:
            bins = len(lengths) / self._rows_per_bin
        return max(1, round(epochs * bins * count / len(probes) / self.bins_per_step))

    def close(self) -> None:
        """Stop preparing ahead."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _produce(self) -> tuple[list[MicroBatch], dict[str, Any]]:
        bins = [self._stream.next_bin() for _ in range(self.bins_per_step)]
        self.source.prefetch([visit for visits in bins[self._rank :: self._ranks] for visit in visits])
        batches = [
            make_batch(self.source, indices, self._mode, self._align, self._pad_to).pin()
            for indices in bins[self._rank :: self._ranks]
        ]
        self._stream.forget()
        return batches, self._stream.state_dict()


class EvalBatches:
    """This rank's share of an evaluation set, each row once; see `eval_batches`."""

    def __init__(
        self,
        source: SampleSource,
        bins: list[list[int]],
        mode: str,
        align: int,
        pad_to: int | None,
        spare: list[int],
    ) -> None:
        self.source = source
        self.bins = bins
        self._spare = spare
        self._mode, self._align, self._pad_to = mode, align, pad_to

    def __len__(self) -> int:
        """Forward passes of this rank, the empty ones included: the same on every rank."""
        return len(self.bins)

    def __iter__(self) -> Iterator[MicroBatch | None]:
        """The micro-batches; None where this rank has no rows left and others do."""
        for indices in self.bins:
            batch = (
                make_batch(self.source, indices, self._mode, self._align, self._pad_to) if indices else None
            )
            yield batch.pin() if batch is not None else None

    def spare(self) -> MicroBatch:
        """A micro-batch to run, not to count, where this rank has none left."""
        return make_batch(self.source, self._spare, self._mode, self._align, self._pad_to).pin()


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
) -> EvalBatches:
    """Micro-batches that hold every usable row of the source once over all ranks; encodes all rows to plan them.

    Args:
        source: samples; the same on every rank.
        mode: "thd" or "none".
        budget: tokens of a packed row (thd).
        micro_batch: rows of a batch (none).
        align: multiple each sample, or the width, is padded to.
        pad_to: static row length, or None.
        dp_rank: this rank's place among the data-parallel ones.
        dp_size: how many those are.
        lookahead: rows the packer may choose from (thd).

    Returns:
        A sized iterable, of the same length on every rank: a rank with fewer bins gets None at the end, for which the
        caller runs its `spare()` to keep collectives in step.

    Raises:
        UserError: no row of the source can be used.
    """
    lengths = {index: length for index in range(len(source)) if (length := source.length(index)) is not None}
    rows = list(lengths)
    if not rows:
        raise UserError(f"data.eval: no row can be used ({source.left_out()}); see bad_rows.jsonl.")
    if mode == "thd":
        plan = plan_bins(lengths.values(), budget, align, lookahead)
        bins = [[rows[position] for position in positions] for positions in plan]
    else:
        bins = [rows[start : start + micro_batch] for start in range(0, len(rows), micro_batch)]
    spare = bins[0]
    bins += [[]] * (-len(bins) % dp_size)
    return EvalBatches(source, bins[dp_rank::dp_size], mode, align, pad_to, spare)


def make_batch(
    source: SampleSource, indices: list[int], mode: str, align: int, pad_to: int | None
) -> MicroBatch:
    """The micro-batch of some usable rows."""
    samples: list[Sample] = []
    for index in indices:
        sample = source.sample(index)
        if sample is None:
            name = source.name(index)
            raise UserError(
                f"{name}: this row could be read before and can't any more; is its folder still there?"
            )
        samples.append(sample)
    pad_id = source.processor.pad_id
    if mode == "thd":
        layout = PackedLayout.from_lengths([sample.length for sample in samples], align, pad_to)
        return collate(samples, layout, pad_id)
    return collate_padded(samples, align, pad_to, pad_id)
