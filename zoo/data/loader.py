"""`BatchLoader`: the endless, resumable stream of optimizer steps; `eval_batches`: every row once.

Guarantees:
- The bins of a step don't depend on the number of data-parallel ranks: that decides only which rank takes which, so that
  all have as much to do (`zoo.packing.share_out`).
- Within an epoch every usable row goes into the stream once; the packer's look-ahead runs on over the epochs' ends.
- `state_dict` belongs to the batches handed out, not to those prepared ahead: a resumed stream equals the
  uninterrupted one, to the sample, also on another number of ranks. With another budget, alignment or mode it holds the same
  rows, in other bins.
- Bins are planned from lengths that no rank has checked yet (`zoo.data.lengths`). Each rank checks its own when it
  encodes them; what was otherwise is told to all, and the step is planned anew.

Costs: rows are measured once by one of the ranks, and encoded by the rank that trains on them, again when they have
left the cache (`data.cache_mb`). One step is prepared ahead in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.lengths import Findings, Lengths, Peers
from zoo.data.sample import MicroBatch, Sample, collate, collate_padded
from zoo.data.sizes import SampleSize
from zoo.data.source import SampleSource
from zoo.errors import ConfigError, UserError
from zoo.packing import BinPacker, PackedLayout, plan_bins, share_out

__all__ = ["BatchLoader", "EvalBatches", "SampleSource", "eval_batches"]

LENGTH_PROBES = 512  # rows whose lengths stand for all when the steps of an epoch are estimated


class BinStream:
    """The endless stream of bins (lists of visits to rows): epochs of a source, packed or in groups.

    Args:
        lengths: of the source, and None for rows that are left out.
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
        lengths: Lengths,
        *,
        mode: str,
        budget: int,
        align: int,
        lookahead: int,
        micro_batch: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.lengths = lengths
        self.source = lengths.source
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.seed = seed
        self.packer = BinPacker[int](budget, align, lookahead) if mode == "thd" else None
        self.epoch = 0
        self.cursor = 0  # rows of this epoch's order that were read
        self._waiting: deque[int] = deque()  # visits of a saved run that other settings pack anew
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
        streams = self.source.stream_state(self._wanted())
        return {**self.place(), "streams": streams}

    def forget(self) -> None:
        """Let go of rows of streams that are in bins already."""
        if self.source.has_stream:
            wanted = self._wanted()
            self.source.forget(wanted)
            self.lengths.forget_all_but(wanted)

    def _wanted(self) -> list[int]:
        """Visits that are to come, those of this epoch and those that are held."""
        if not self.source.has_stream:
            return []
        held = [] if self.packer is None else [item[0] for item in self.packer.state_dict()["items"]]
        return [*held, *self._waiting, *self._order[self.cursor :].tolist()]

    def place(self) -> dict[str, Any]:
        """Where it stands, streams aside, to `rewind` to."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "waiting": list(self._waiting),
            "packing": self._packing,
            "packer": None if self.packer is None else self.packer.state_dict(),
            "corrected": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.source.load_stream_state(state.get("streams", {}))
        self.rewind(state)

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to a state; rows that it holds and that were corrected since then are taken as they are now."""
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._make_order()
        self._waiting = deque(state["waiting"])
        held = state["packer"] or {"items": [], "seen": [0, 0]}
        sizes = {visit: (tokens, cost) for visit, tokens, cost in held["items"]}
        if self.packer is None or state["packing"] != self._packing:
            self.lengths.load_state_dict(state["corrected"], {})
            self._waiting.extendleft(reversed(sizes))
            if self.packer is not None:
                self.packer.load_state_dict({"items": [], "seen": [0, 0]})
            return
        self.lengths.load_state_dict(state["corrected"], sizes)
        items = [(visit, size) for visit in sizes if (size := self.lengths.get(visit)) is not None]
        self.packer.load_state_dict(
            {"items": [[visit, *size] for visit, size in items], "seen": held["seen"]}
        )

    @property
    def _packing(self) -> list[int] | None:
        """What makes the items of one packer fit another."""
        return None if self.packer is None else [self.packer.budget, self.packer.align]

    def _next_row(self) -> tuple[int, int, int]:
        """The next usable visit (see `SampleSource.encode`), its length and its cost."""
        for _ in range(2 * len(self.source) + len(self._waiting) + 1):
            while not self._waiting and self.cursor == len(self._order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._make_order()
            visit = self._waiting[0] if self._waiting else int(self._order[self.cursor])
            if not self.lengths.knows(visit):
                self.lengths.ahead(self._coming())
            if self._waiting:
                self._waiting.popleft()
            else:
                self.cursor += 1
            size = self.lengths.get(visit)
            if size is not None:
                return visit, *size
        raise UserError(f"data.train: no usable row is left ({self.source.left_out()}); see bad_rows.jsonl.")

    def _coming(self) -> list[int]:
        """The next visits of this epoch, a block to measure together."""
        end = min(self.cursor + self.lengths.block, len(self._order))
        return [*self._waiting, *self._order[self.cursor : end].tolist()]

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
        cost: of a sample, as an integer of at least 1, to share bins out by; None: its tokens.
        peers: all ranks of the run, which measure and check together; None where there is one.
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
        cost: Callable[[SampleSize], int] | None = None,
        peers: Peers | None = None,
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
        self.lengths = Lengths(source, cost, peers)
        self.bins_per_step = train.global_batch // rows_per_bin
        self.step = 0
        self._align, self._rank, self._ranks = align, dp_rank, dp_size
        self._mode, self._pad_to = packing.mode, packing.pad_to
        self._budget, self._lookahead = packing.budget, recipe.data.lookahead
        self._rows_per_bin = rows_per_bin
        self._stream = BinStream(
            self.lengths,
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
        coming = visits[probes].tolist()
        self.lengths.ahead(coming)
        sizes = [size for visit in coming if (size := self.lengths.get(visit)) is not None]
        if self._mode == "thd":
            tokens, costs = [size[0] for size in sizes], [size[1] for size in sizes]
            bins: float = sum(1 for _ in plan_bins(tokens, self._budget, self._align, self._lookahead, costs))
        else:
            bins = len(sizes) / self._rows_per_bin
        return max(1, round(epochs * bins * count / len(probes) / self.bins_per_step))

    def close(self) -> None:
        """Stop preparing ahead."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _produce(self) -> tuple[list[MicroBatch], dict[str, Any]]:
        while True:
            before = self._stream.place()
            bins = [self._stream.next_bin() for _ in range(self.bins_per_step)]
            shared = share_out([self._cost_of(visits) for visits in bins], self._ranks)
            mine = [bins[index] for index in shared[self._rank]]
            self.source.prefetch([visit for visits in mine for visit in visits])
            samples, findings = encode_all(self.lengths, mine)
            if not self.lengths.agree(findings):
                break
            self._stream.rewind(before)
        pad_id = self.source.processor.pad_id
        batches = [make_batch(some, self._mode, self._align, self._pad_to, pad_id) for some in samples]
        self._stream.forget()
        return batches, self._stream.state_dict()

    def _cost_of(self, visits: Sequence[int]) -> int:
        return sum(size[1] for visit in visits if (size := self.lengths.get(visit)) is not None)


class EvalBatches:
    """This rank's share of an evaluation set, each row once; see `eval_batches`.

    `bins` are the rows of each forward pass. Those that can't be encoded are taken out as they are met, and counted on every
    rank at the end of a pass.
    """

    def __init__(
        self, lengths: Lengths, bins: list[list[int]], mode: str, align: int, pad_to: int | None
    ) -> None:
        self.source = lengths.source
        self.bins = bins
        self._lengths = lengths
        self._mode, self._align, self._pad_to = mode, align, pad_to

    def __len__(self) -> int:
        """Forward passes of this rank, the empty ones included: the same on every rank."""
        return len(self.bins)

    def __iter__(self) -> Iterator[MicroBatch | None]:
        """The micro-batches; None where this rank has no rows left and others do."""
        found: Findings = {}
        for indices in self.bins:
            (samples,), findings = encode_all(self._lengths, [indices])
            for index, finding in findings.items():
                if isinstance(finding, RowError):
                    self.source.leave_out(index, finding)
                    indices.remove(index)
            found |= findings
            yield self._batch(samples) if samples else None
        for index in self._lengths.agree(found):
            self._lengths.get(index)

    def spare(self) -> MicroBatch:
        """A micro-batch to run, not to count, where this rank has none left."""
        for index in range(len(self.source)):
            (samples,), _ = encode_all(self._lengths, [[index]])
            if samples:
                return self._batch(samples)
        raise UserError(f"data.eval: no row can be used ({self.source.left_out()}); see bad_rows.jsonl.")

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
    peers: Peers | None = None,
) -> EvalBatches:
    """Micro-batches that hold every usable row of the source once over all ranks; measures all rows to plan them.

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
        cost: of a sample, as `BatchLoader` takes it; and so `peers`.

    Returns:
        A sized iterable, of the same length on every rank: a rank with fewer bins gets None at the end, for which the
        caller runs its `spare()` to keep collectives in step.

    Raises:
        UserError: no row of the source can be used.
    """
    lengths = Lengths(source, cost, peers)
    lengths.ahead(range(len(source)))
    sizes = {index: size for index in range(len(source)) if (size := lengths.get(index)) is not None}
    rows = list(sizes)
    if not rows:
        raise UserError(f"data.eval: no row can be used ({source.left_out()}); see bad_rows.jsonl.")
    if mode == "thd":
        tokens, costs = [size[0] for size in sizes.values()], [size[1] for size in sizes.values()]
        plan = plan_bins(tokens, budget, align, lookahead, costs)
        bins = [[rows[position] for position in positions] for positions in plan]
    else:
        bins = [rows[start : start + micro_batch] for start in range(0, len(rows), micro_batch)]
    bins += [[] for _ in range(-len(bins) % dp_size)]
    return EvalBatches(lengths, bins[dp_rank::dp_size], mode, align, pad_to)


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
