"""`BatchLoader`: the endless, resumable stream of optimizer steps.

Guarantees:
- The bins of a step don't depend on the number of data-parallel ranks: that decides only which rank takes which, so that
  all have as much to do (`zoo.packing.deal_bins`).
- Within an epoch every usable row goes into the stream once; the packer's look-ahead runs on over the epochs' ends.
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

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zoo.config.schema import Recipe
from zoo.data.loading.batches import encode_all, make_batch, with_most_tokens
from zoo.data.loading.bin_stream import BinStream, Position
from zoo.data.loading.lengths import Lengths, RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import MicroBatch, Sample
from zoo.data.sources.mixture import SampleId
from zoo.errors import ConfigError, UserError
from zoo.packing import deal_bins, plan_bins

STEPS_AHEAD = 4  # steps whose rows are known before they are taken, where workers encode them
LENGTH_PROBES = 512  # rows whose lengths stand for all when the steps of an epoch are estimated


class PlannedStep(NamedTuple):
    """A step whose rows are known."""

    before: Position  # of the stream
    mine: list[list[SampleId]]  # this rank's bins
    state: dict[str, Any]  # where the stream stands behind the step


class PreparedStep(NamedTuple):
    """A step that is ready to be handed out."""

    batches: list[MicroBatch]  # of this rank
    state: dict[str, Any]  # where the stream stands behind the step


class BatchLoader:
    """Micro-batches of this rank, one optimizer step after the other, without end.

    Args:
        source: samples; the same rows in the same order on every rank.
        recipe: its packing, data.shuffle, data.lookahead, train.global_batch, train.micro_batch and run.seed are used.
        align: multiple each sample is padded to (thd), or the width of the batch (none).
        dp_rank: this rank's place among the data-parallel ones.
        dp_size: how many those are.
        cost: of a sample, as an integer of at least 1, to share bins out by; None: its tokens.
        group: all ranks of the run, which measure and check together; None where there is one.
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
        group: RankGroup | None = None,
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
        self.lengths = Lengths(source, cost, group)
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
        self._ahead: Future[PreparedStep] | None = None
        self._planned: deque[PlannedStep] = deque()
        # Rows of a stream are let go of once they are in a bin, so none can be planned anew.
        self._plans = STEPS_AHEAD if source.workers is not None and not source.rows.has_stream else 1

    @property
    def begun(self) -> bool:
        """Whether the next step is being prepared."""
        return self._ahead is not None

    def begin(self) -> None:
        """Prepare the next step from now on, before it is asked for; without `prefetch` nothing is."""
        if self._executor is not None and self._ahead is None:
            self._ahead = self._executor.submit(self._produce)

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next optimizer step (in pinned memory where there is a GPU).

        Raises:
            RowError: a bad row, under data.on_error=raise.
            UserError: no usable row is left.
        """
        batches, state = self._ahead.result() if self._ahead is not None else self._produce()
        self._state, self.step, self._ahead = state, self.step + 1, None
        self.begin()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which another loader resumes behind the last step handed out; the same on every rank."""
        return {"step": self.step, "rows": len(self.source), "seed": self._stream.seed, **self._state}

    def load_state_dict(self, state: dict[str, Any], sizes: list[int | None] | None = None) -> None:
        """Resume from a saved state.

        Args:
            state: of `state_dict`.
            sizes: rows that each part of the source had then, where rows have been added behind them since.

        Raises:
            ConfigError: the data or the seed are not those of the saved run, or an earlier zoo wrote the state.
        """
        if "waiting" not in state:
            raise ConfigError(
                "An earlier zoo wrote the checkpoint's place in the data, and this one can't resume from it; start from "
                "its weights with model.init=<its run folder> in a new run.dir."
            )
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
        self.step, self._state = state["step"], self._stream.state_dict()

    def begin_anew(self, step: int) -> None:
        """Begin with the data anew, and count steps from `step` on."""
        self.step = step

    def steps_for_epochs(self, epochs: float) -> int:
        """About how many steps so many passes over the rows take, from the lengths of up to LENGTH_PROBES rows."""
        if self.source.rows.has_stream:
            raise UserError("train.epochs: a stream of data.train has no end; give train.steps instead.")
        ids = self.source.rows.order(0, self._stream.seed, shuffle=False)
        count = len(ids)
        probes = np.unique(np.linspace(0, count - 1, min(count, LENGTH_PROBES)).round().astype(int))
        probed: list[SampleId] = ids[probes].tolist()
        self.lengths.ahead(probed)
        sizes = [size for sample_id in probed if (size := self.lengths.get(sample_id)) is not None]
        if self._mode == "thd":
            tokens, costs = [size.tokens for size in sizes], [size.cost for size in sizes]
            bins: float = sum(1 for _ in plan_bins(tokens, self._budget, self._align, self._lookahead, costs))
        else:
            bins = len(sizes) / self._rows_per_bin
        return max(1, round(epochs * bins * count / len(probes) / self.bins_per_step))

    def close(self) -> None:
        """Stop preparing ahead, and end the source's workers."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _produce(self) -> PreparedStep:
        while True:
            self._plan()
            plan = self._planned[0]
            encoded = encode_all(self.lengths, plan.mine)
            batches = [] if encoded.findings else self._batches(encoded.bins)
            weight = math.fsum(batch.loss_weight for batch in batches)
            mine = self._rank, weight, [batch.total for batch in batches]
            findings, everyone = self.lengths.exchange(encoded.findings, mine)
            if not findings:
                break
            self._stream.rewind(plan.before)
            self._planned.clear()
        self._planned.popleft()
        self._stream.forget()
        weights = {rank: weight for rank, weight, _ in everyone}  # ranks of one replica say the same
        step_weight = math.fsum(weights.values())
        batches = [replace(batch, step_weight=step_weight) for batch in batches]
        return PreparedStep(with_most_tokens(batches, [totals for *_, totals in everyone]), plan.state)

    def _batches(self, bins: Sequence[Sequence[Sample]]) -> list[MicroBatch]:
        pad_id = self.source.processor.pad_id
        return [make_batch(samples, self._mode, self._align, self._pad_to, pad_id) for samples in bins]

    def _plan(self) -> None:
        """Plan the next step and, where workers encode ahead, some more; begin with their rows."""
        while len(self._planned) < self._plans:
            before = self._stream.position()
            try:
                bins = [self._stream.next_bin() for _ in range(self.bins_per_step)]
            except UserError:
                if not self._planned:
                    raise
                self._stream.rewind(before)  # it is raised again when its step is next
                break
            shared = deal_bins([self._cost_of(ids) for ids in bins], self._ranks)
            mine = [bins[index] for index in shared[self._rank]]
            self._planned.append(PlannedStep(before, mine, self._stream.state_dict()))
        self.source.prefetch(
            [sample_id for plan in self._planned for ids in plan.mine for sample_id in ids], alone=True
        )

    def _cost_of(self, ids: Sequence[SampleId]) -> int:
        return sum(size.cost for sample_id in ids if (size := self.lengths.get(sample_id)) is not None)
