"""`BatchLoader`: the resumable stream of optimizer steps, endless or of some epochs.

Guarantees:
- The bins of a step don't depend on the number of data-parallel ranks: that decides only which rank takes which, so that
  all have as much to do (`zoo.packing.deal_bins`).
- Within an epoch every usable row goes into the stream once; the packer's look-ahead runs on over the epochs' ends.
- After `steps_for_epochs` the stream ends with these epochs, and every usable row of them has been in one bin. Bins of the last steps
  may be part-full, and the last step may have fewer. Each rank has as many micro-batches all the same: where bins are
  missing, as where ranks do not divide the batch, a copy of the step's shortest sample that counts nothing (`MicroBatch.filler`).
- `state_dict` belongs to the batches handed out, not to those prepared ahead: a resumed stream equals the
  uninterrupted one, to the sample, also on another number of ranks. With another budget, alignment or mode it holds the same
  rows, in other bins.
- Bins are planned from lengths that no rank has checked yet (`zoo.data.loading.lengths`). Each rank checks the samples that
  it encodes; where one differs, all ranks correct its length and plan the step anew.

Costs: rows are measured once by one of the ranks, and encoded by the rank that trains on them, again when they have
left the cache (`data.cache_mb`). One step is prepared ahead in a thread; encoding workers begin with the rows of the steps
behind it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from zoo.config.schema import Recipe
from zoo.data.loading.batches import encode_all, make_batch, with_most_tokens
from zoo.data.loading.bin_stream import BinStream, Position, RunLength
from zoo.data.loading.lengths import Lengths, RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import MicroBatch, Sample
from zoo.data.sources.mixture import SampleId
from zoo.errors import ConfigError, UserError
from zoo.packing import deal_bins
from zoo.types import JsonMapping, JsonObject

STEPS_AHEAD = 4  # steps whose rows are known before they are taken, where workers encode them


class PlannedStep(NamedTuple):
    """A step whose rows are known."""

    before: Position  # of the stream
    local_bins: list[list[SampleId]]  # this rank's bins
    fillers: int  # of the last of these bins, which only fill the step up
    left: int  # steps that follow, by what is known of them; 0 without epochs
    state: JsonObject  # where the stream stands behind the step


class PreparedStep(NamedTuple):
    """A step that is ready to be handed out."""

    batches: list[MicroBatch]  # of this rank; [] where the epochs are over
    left: int  # as `PlannedStep` has it
    state: JsonObject  # where the stream stands behind the step


class BatchLoader:
    """Micro-batches of this rank, one optimizer step after the other, without end before `steps_for_epochs`.

    Args:
        source: samples; the same rows in the same order on every rank.
        recipe: its packing, data.shuffle, data.lookahead, train.global_batch, train.micro_batch, run.seed and pipeline are used.
        align: multiple each sample is padded to (thd), or the width of the batch (none).
        dp_rank: this rank's place among the data-parallel ones.
        dp_size: how many those are.
        cost: of a sample, as an integer of at least 1, to share bins out by; None: its tokens.
        group: all ranks of the run, which measure and check together; None where there is one.
        prefetch: prepare the next step in a thread.

    Raises:
        ConfigError: packing.pad_to is less than packing.budget.
    """

    ready_ahead = True  # whether the next step may be fetched before this one's update
    answerer = None  # gives metrics of held-out rows in the place of a forward pass
    within_rollout = False  # whether a run can't be resumed from here
    metrics: JsonMapping = MappingProxyType({})  # of the step handed out last, beside those of its loss

    def __init__(
        self,
        source: SampleSource,
        recipe: Recipe,
        *,
        align: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        cost: Callable[[SampleSize], int] | None = None,
        group: RankGroup | None = None,
        prefetch: bool = True,
    ) -> None:
        packing, train = recipe.packing, recipe.train
        rows_per_bin = 1 if packing.mode == "thd" else train.micro_batch
        if packing.pad_to is not None and packing.pad_to < packing.budget:
            text = f"packing.pad_to is {packing.pad_to}, under packing.budget {packing.budget}; set both to the same."
            raise ConfigError(text)
        self.source, self.lengths = source, Lengths(source, cost, group)
        self.bins_per_step = train.global_batch // rows_per_bin
        self.step = 0
        self._align, self._rank, self._ranks = align, dp_rank, dp_size
        self._mode, self._pad_to = packing.mode, packing.pad_to
        # What the number of a rank's micro-batches divides by: interleaved pipelines want a multiple of their stages.
        self._multiple = recipe.parallel.pp if recipe.parallel.vpp > 1 else 1
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
        self._length: RunLength | None = None  # None: without end
        self.short_step: int | None = None  # bins of the last step, where it is known to have fewer than others
        self.unlabelled = "no row of it has a token to learn"  # as `RolloutLoader.unlabelled`
        self._left = 0  # steps behind the last one handed out, by what is known of them
        self._state = self._stream_state()
        self._executor = ThreadPoolExecutor(1, "zoo-data") if prefetch else None
        self._ahead: Future[PreparedStep] | None = None
        self._planned: deque[PlannedStep] = deque()
        # Rows of a stream are let go of once they are in a bin, so none can be planned anew.
        self._plans = STEPS_AHEAD if source.workers is not None and not source.rows.has_stream else 1

    @property
    def begun(self) -> bool:
        """Whether the next step is being prepared."""
        return self._ahead is not None

    def begin(self) -> None:
        """Prepare the next step in the thread; does nothing without `prefetch`."""
        if self._executor is not None and self._ahead is None:
            self._ahead = self._executor.submit(self._produce)

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next optimizer step (in pinned memory where there is a GPU); [] after the last one.

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no usable row is left.
        """
        batches, left, state = self._ahead.result() if self._ahead is not None else self._produce()
        self._ahead, self._left = None, left
        if batches:
            self._state, self.step = state, self.step + 1
            self.begin()
        return batches

    def state_dict(self) -> JsonObject:
        """Plain values from which another loader resumes behind the last step handed out; the same on every rank."""
        return {"step": self.step, "rows": len(self.source), "seed": self._stream.seed, **self._state}

    def load_state_dict(self, state: JsonObject, sizes: list[int | None] | None = None) -> None:
        """Resume from a saved state.

        Args:
            state: of `state_dict`.
            sizes: rows that each part of the source had then, where rows have been added behind them since.

        Raises:
            ConfigError: the data or the seed are not those of the saved run.
        """
        if sizes is not None:
            state = {**self._stream.grown(state, sizes), "rows": len(self.source)}
        if (state["rows"], state["seed"]) != (len(self.source), self._stream.seed):
            raise ConfigError(
                f"The checkpoint's data had {state['rows']} rows and run.seed {state['seed']}; now there are "
                f"{len(self.source)} rows and seed {self._stream.seed}. Resume with the same, or begin anew with the data there are by "
                f"run.accept_changes=[data.train,run.seed]."
            )
        if self._ahead is not None:
            self._ahead.exception()  # wait: the thread moves the stream
            self._ahead = None
        self._planned.clear()
        self._stream.load_state_dict(state)
        self.step, self._state = state["step"], {**self._stream_state(), "length": state.get("length")}
        if self._length is not None and self._stream.epochs is not None:
            self.steps_for_epochs(self._stream.epochs)

    def begin_anew(self, step: int) -> None:
        """Begin with the data anew, and count steps from `step` on."""
        self.step = step

    def end_after(self, epochs: float) -> None:
        """End the stream after so many epochs, counted from the first, without counting its steps."""
        if self._ahead is not None or self._planned:
            self.load_state_dict(self.state_dict())
        self._stream.end_after(epochs)

    def steps_for_epochs(self, epochs: float) -> int:
        """End the stream after so many epochs, counted from the first, and give `total_steps`; every rank calls it.

        A fraction of an epoch is its first samples.

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: there is a stream, or no usable row.
        """
        if self.source.rows.has_stream:
            raise UserError("train.epochs: a stream of data.train has no end; give train.steps instead.")
        self.end_after(epochs)
        saved, stream = self._state.get("length"), self._stream
        if saved is not None and not saved["exact"] and saved["settings"] == stream.settings_of(epochs):
            self._length = RunLength(**saved)
        else:
            self._length = stream.plan_length(epochs)
        bins = self._length.bins if self._length.exact else 0
        self.short_step = int(bins) % self.bins_per_step or None
        self._left, self._state = self._steps_left(), self._stream_state()
        return self.step + self._left

    @property
    def total_steps(self) -> int | None:
        """Steps of the run up to its end; an estimate unless `exact`, which each step may correct. None without an end."""
        return None if self._length is None else self.step + self._left

    @property
    def exact(self) -> bool:
        """Whether `total_steps` is counted, not estimated."""
        return self._length is not None and self._length.exact

    def abandon(self) -> None:
        """Have the thread leave off at the next row."""
        self.source.abandon()

    def close(self) -> None:
        """Stop preparing ahead, and end the source's workers."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _produce(self) -> PreparedStep:
        while True:
            self._plan()
            if not self._planned:
                return PreparedStep([], 0, self._state)
            plan = self._planned[0]
            encoded = encode_all(self.lengths, plan.local_bins)
            batches = [] if encoded.findings else self._batches(encoded.bins, plan.fillers)
            weight = math.fsum(batch.loss_weight for batch in batches)
            summary = Fraction(weight), [batch.total for batch in batches]
            findings, (weight_of_all, most) = self.lengths.exchange(encoded.findings, summary, _merged)
            if not findings:
                break
            self._stream.rewind(plan.before)
            self._planned.clear()
            self._length = None if self._length is None else replace(self._length, exact=False)
        self._planned.popleft()
        self._stream.forget()
        copies = max(1, self.lengths.group.size // self._ranks)  # ranks of one replica say the same
        batches = [replace(batch, step_weight=float(weight_of_all / copies)) for batch in batches]
        batches = with_most_tokens(batches, [most])
        return PreparedStep(batches, plan.left, plan.state)

    def _batches(self, bins: Sequence[Sequence[Sample]], fillers: int) -> list[MicroBatch]:
        """The micro-batches of bins, of which the last `fillers` count nothing."""
        pad_id = self.source.processor.pad_id
        batches = [make_batch(samples, self._mode, self._align, self._pad_to, pad_id) for samples in bins]
        counted = len(batches) - fillers
        return batches[:counted] + [replace(batch, filler=True, sources=(), kinds=()) for batch in batches[counted:]]

    def _plan(self) -> None:
        """Plan the next step and, where workers encode ahead, some more; begin with their rows."""
        while len(self._planned) < self._plans:
            before = self._stream.position()
            try:
                bins = list(itertools.takewhile(bool, (self._stream.next_bin() for _ in range(self.bins_per_step))))
            except UserError:
                if not self._planned:
                    raise
                self._stream.rewind(before)  # it is raised again when its step is next
                break
            if not bins:
                break
            local_bins, fillers = self._share_of(bins)
            self._planned.append(PlannedStep(before, local_bins, fillers, self._steps_left(), self._stream_state()))
        self.source.prefetch(
            [sample_id for plan in self._planned for ids in plan.local_bins for sample_id in ids], alone=True
        )

    def _share_of(self, bins: Sequence[list[SampleId]]) -> tuple[list[list[SampleId]], int]:
        """This rank's bins, as many as each rank has, and how many of them only stand in for bins that are missing."""
        unit = self._ranks * self._multiple
        missing = -len(bins) % unit
        sizes = {
            sample_id: size for ids in bins for sample_id in ids if (size := self.lengths.get(sample_id)) is not None
        }
        costs = [sum(sizes[sample_id].cost for sample_id in ids if sample_id in sizes) for ids in bins] + [0] * missing
        shared = deal_bins(costs, self._ranks)[self._rank]
        local_bins = [bins[index] for index in shared if index < len(bins)]
        fillers = len(shared) - len(local_bins)
        if fillers:
            shortest = min(sizes, key=lambda sample_id: (sizes[sample_id].tokens, sample_id))
            local_bins += [[shortest]] * fillers
        return local_bins, fillers

    def _steps_left(self) -> int:
        """Steps from where the stream stands to its end, by what is known of them; 0 without an end."""
        if self._length is None or not self._stream.remaining() or self._stream.ended():
            return 0
        return max(1, math.ceil(self._length.left(self._stream.bins, self._stream.remaining()) / self.bins_per_step))

    def _stream_state(self) -> JsonObject:
        length = None if self._length is None else asdict(self._length)
        return {**self._stream.state_dict(), "length": length}


def _merged(summaries: Sequence[tuple[Fraction, list[int]]]) -> tuple[Fraction, list[int]]:
    """The sum of weights, exact and so the same in any order, and the most tokens of each micro-batch; [] of no micro-batches."""
    weights, totals = zip(*summaries, strict=True)
    return sum(weights, Fraction()), [max(at_once) for at_once in zip(*totals, strict=False)]
