"""`BinStream`: the stream of bins, lists of sample ids, that every rank plans alike: endless, or of some epochs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from zoo.data.loading.lengths import EXACT_ROWS, EXACT_SAMPLES, LENGTH_PROBES, Lengths, Size
from zoo.data.sources.mixture import STREAM_ROWS, SampleId
from zoo.data.sources.row_set import spread
from zoo.errors import UserError
from zoo.packing import BinPacker, plan_bins
from zoo.types import JsonObject


@dataclass(frozen=True)
class RunLength:
    """How many bins the epochs of a run still fill, from a place of a `BinStream` to its end: counted or estimated.

    Where texts and headers give all lengths, the bins are counted by packing these lengths once: exact, unless a row turns out to be
    otherwise when it is encoded. Else the first estimate comes from LENGTH_PROBES rows, and each step corrects it by the bins so far. It
    depends on nothing but the place in the data, so that it is the same on any number of ranks, and in a resumed run.

    Costs: measuring, which ranks share and each row needs once anyway, and 5 us a sample for the packing.

    Attributes:
        settings: what it was planned for, as plain values.
        bins: bins from that place on; an estimate unless `exact`.
        samples: samples from that place on.
        before: bins taken before that place.
        exact: whether the bins were counted, and no row has turned out otherwise since.
        trust: samples that the estimate rests on, beside those that have passed.
    """

    settings: JsonObject
    bins: float
    samples: int
    before: int
    exact: bool
    trust: int

    def left(self, taken: int, remaining: int) -> float:
        """Bins to the end, where `taken` bins have been taken in all and `remaining` samples are to come."""
        bins = taken - self.before
        if self.exact:
            return self.bins - bins
        passed = self.samples - remaining
        return remaining * (self.bins / self.samples * self.trust + bins) / (self.trust + passed)


@dataclass(frozen=True)
class Position:
    """Where a `BinStream` stands, as plain values.

    Attributes:
        epoch: from 0.
        cursor: samples of this epoch's order that were read.
        waiting: samples of a saved run that other settings pack anew, before those of the epoch.
        packing: budget and alignment of the packer; None in groups.
        packer: state of the packer, its items as [sample id, tokens, cost]; None in groups.
        sizes: rows of each part of the source when the epoch began, where it has grown since.
        bins: bins taken so far.
    """

    epoch: int
    cursor: int
    waiting: list[SampleId]
    packing: list[int] | None
    packer: JsonObject | None
    sizes: list[int | None] | None = None
    bins: int = 0

    @classmethod
    def from_state(cls, state: JsonObject) -> Position:
        """The position that a saved state holds."""
        return cls(**{field.name: state[field.name] for field in fields(cls) if field.name in state})


class BinStream:
    """The stream of bins (lists of sample ids): epochs of a source, packed or in groups.

    It has no end before `end_after` says so. Then every usable sample of these epochs is in one bin; bins run on over the ends of
    epochs but the last, where the packer gives all that it holds: these bins may be part-full.

    Args:
        lengths: of the source.
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
        self.lengths, self.source = lengths, lengths.source
        self.micro_batch, self.shuffle, self.seed = micro_batch, shuffle, seed
        self.packer = BinPacker[SampleId](budget, align, lookahead) if mode == "thd" else None
        self.epochs: float | None = None  # after which the stream ends
        self.bins = 0  # taken so far
        self.epoch = 0
        self.cursor = 0  # samples of this epoch's order that were read
        self._waiting: deque[SampleId] = deque()  # see `Position`
        self._sizes: list[int | None] | None = None  # see `Position`
        self._order = self._make_order()

    def end_after(self, epochs: float) -> None:
        """End the stream after so many epochs; of a fraction of one, so many of its first samples, at least one in all."""
        self.epochs = epochs
        self._order = self._make_order()

    def next_bin(self) -> list[SampleId]:
        """Samples of the next bin, in order; [] at the end of the stream.

        Raises:
            UserError: no row can be used.
        """
        samples: list[SampleId] = []
        if self.packer is None:
            while len(samples) < self.micro_batch and (following := self._next_sample()) is not None:
                samples.append(following[0])
        else:
            while not self.packer.ready() and (following := self._next_sample()) is not None:
                self.packer.add(following[0], following[1].tokens, following[1].cost)
            samples = self.packer.pop() if len(self.packer) else []
        if not samples and not self.bins:
            raise self._nothing_left()
        self.bins += bool(samples)
        return samples

    def ended(self) -> bool:
        """Whether no usable sample is left.

        Raises:
            UserError: no row can be used.
        """
        if self.epochs is None or (self.packer is not None and len(self.packer)):
            return False
        ended = self._peek() is None
        if ended and not self.bins:
            raise self._nothing_left()
        return ended

    def remaining(self) -> int:
        """Samples still to come until the end, those that can't be used included."""
        held = len(self._waiting) + (0 if self.packer is None else len(self.packer))
        later = range(self.epoch + 1, self.epoch + 1 if self.epochs is None else math.ceil(self.epochs))
        further = sum(self._count(epoch, self.source.rows.epoch_size(epoch)) for epoch in later)
        return held + max(0, len(self._order) - self.cursor) + further

    def remaining_ids(self) -> Iterator[np.ndarray]:
        """Ids of the samples still to come that no bin and no packer has, epoch by epoch."""
        yield np.concatenate((np.array(self._waiting, np.int64), self._order[self.cursor :]))
        epoch = self.epoch + 1
        while self._share(epoch):
            order = self.source.rows.order(epoch, self.seed, self.shuffle)
            yield order[: self._count(epoch, len(order))]
            epoch += 1

    def plan_length(self, epochs: float) -> RunLength:
        """How many bins follow to the end after so many epochs; every rank calls it.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        settings = self.settings_of(epochs)
        samples, rows, lengths = self.remaining(), len(self.source), self.lengths
        if not samples:
            return RunLength(settings, 0, 0, self.bins, True, 0)
        if samples <= EXACT_SAMPLES and rows <= EXACT_ROWS:
            lengths.recall()
        probes = np.array(spread(rows, LENGTH_PROBES))
        by_headers = lengths.measure(probes)
        lengths.ahead(probes.tolist())
        exact = (
            samples <= EXACT_SAMPLES
            and rows <= EXACT_ROWS
            and (by_headers or len(probes) == rows)
            and all(lengths.measure(ids) for ids in self.remaining_ids())
        )
        if exact:
            lengths.keep()
            return RunLength(settings, self.count_bins(), samples, self.bins, True, samples)
        tokens, costs = lengths.usable(probes)
        if self.packer is None:
            bins = len(tokens) / self.micro_batch
        else:
            packing = self.packer.budget, self.packer.align, self.packer.lookahead
            bins = sum(1 for _ in plan_bins(tokens.tolist(), *packing, costs.tolist()))
        return RunLength(settings, bins * samples / len(probes), samples, self.bins, False, len(probes))

    def count_bins(self) -> int:
        """Bins from here to the end of the stream, where all lengths are known; the stream stays where it is.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        usable = (self.lengths.usable(ids) for ids in self.remaining_ids())
        if self.packer is None:
            return -(-sum(len(tokens) for tokens, _ in usable) // self.micro_batch)
        packer = BinPacker[SampleId](self.packer.budget, self.packer.align, self.packer.lookahead)
        packer.load_state_dict(self.packer.state_dict())
        bins = 0
        for tokens, costs in usable:
            for length, cost in zip(tokens.tolist(), costs.tolist(), strict=True):
                packer.add(SampleId(0), length, cost)
                while packer.ready():
                    packer.pop()
                    bins += 1
        return bins + sum(1 for _ in packer.flush())

    def state_dict(self) -> JsonObject:
        """Where the stream stands, as plain values: its position, corrected lengths, and places in streams of rows."""
        return {
            **vars(self.position()),
            "corrected": self.lengths.state_dict(),
            "streams": self.source.rows.stream_state(self._wanted()),
            "sizes_of": self.source.sizes_follow_from(),
        }

    def forget(self) -> None:
        """Let go of rows of streams that are in bins already."""
        if self.source.rows.has_stream:
            wanted = self._wanted()
            self.source.forget(wanted)
            self.lengths.forget_all_but(wanted)

    def _wanted(self) -> list[SampleId]:
        """Samples that are to come, those of this epoch and those that are held."""
        if not self.source.rows.has_stream:
            return []
        held = [] if self.packer is None else [item[0] for item in self.packer.state_dict()["items"]]
        return [*held, *self._waiting, *self._order[self.cursor :].tolist()]

    def position(self) -> Position:
        """Where the stream stands, to `rewind` to."""
        return Position(
            epoch=self.epoch,
            cursor=self.cursor,
            waiting=list(self._waiting),
            packing=self._packing,
            packer=None if self.packer is None else self.packer.state_dict(),
            sizes=self._sizes,
            bins=self.bins,
        )

    def load_state_dict(self, state: JsonObject) -> None:
        """Resume from a saved state."""
        self.source.rows.load_stream_state(state.get("streams", {}))
        now = self.source.sizes_follow_from()
        if all(old == new for old, new in zip(state.get("sizes_of", now), now, strict=False)):
            self.lengths.load_state_dict(state["corrected"])
        self.rewind(Position.from_state(state))

    def grown(self, state: JsonObject, sizes: list[int | None]) -> JsonObject:
        """A saved state for the source as it is now, after rows were added: the same samples by their new ids.

        The epoch at hand keeps the rows that it began with; the others join in the next one.

        Args:
            state: of `state_dict`.
            sizes: rows of each part of the source when the state was saved.
        """
        rows = sum(STREAM_ROWS if size is None else size for size in sizes)

        def renumbered(old: SampleId) -> SampleId:
            return self.source.rows.renumber([old], sizes)[0]

        def key(old: int) -> int:  # of a variant and a row
            variant, row = divmod(old, rows)
            return variant * len(self.source) + renumbered(SampleId(row))

        packer = state["packer"]
        if packer is not None:
            packer = {**packer, "items": [[renumbered(old), *size] for old, *size in packer["items"]]}
        return {
            **state,
            "packer": packer,
            "waiting": [renumbered(old) for old in state["waiting"]],
            "corrected": [[key(old), *correction] for old, *correction in state["corrected"]],
            "sizes": state.get("sizes") or sizes,
        }

    def rewind(self, position: Position) -> None:
        """Go back to a position; samples that it holds and that were corrected since then have their corrected sizes."""
        self.epoch, self.cursor, self._sizes, self.bins = position.epoch, position.cursor, position.sizes, position.bins
        self._order = self._make_order()
        self._waiting = deque(position.waiting)
        held = position.packer or {"items": [], "seen": [0, 0]}
        sizes = {SampleId(sample_id): Size(*size) for sample_id, *size in held["items"]}
        if self.packer is None or position.packing != self._packing:
            self._waiting.extendleft(reversed(sizes))
            if self.packer is not None:
                self.packer.load_state_dict({"items": [], "seen": [0, 0]})
            return
        self.lengths.remember(sizes)
        items = [[key, *size] for key in sizes if (size := self.lengths.get(key)) is not None]
        self.packer.load_state_dict({"items": items, "seen": held["seen"]})

    def settings_of(self, epochs: float) -> JsonObject:
        """What the bins of so many epochs follow from, as plain values."""
        packing = None if self.packer is None else [self.packer.budget, self.packer.align, self.packer.lookahead]
        rows = {"rows": self.source.rows.sizes, "seed": self.seed, "shuffle": self.shuffle}
        return {"epochs": epochs, **rows, "packing": packing, "micro_batch": self.micro_batch}

    @property
    def _packing(self) -> list[int] | None:
        """What makes the items of one packer fit another."""
        return None if self.packer is None else [self.packer.budget, self.packer.align]

    def _next_sample(self) -> tuple[SampleId, Size] | None:
        """The next sample whose row can be used, and its size; None at the end of the stream."""
        following = self._peek()
        if following is not None:
            self._advance()
        return following

    def _peek(self) -> tuple[SampleId, Size] | None:
        """`_next_sample`, which stays the next; samples before it that can't be used are passed over."""
        for _ in range(2 * len(self.source) + len(self._waiting) + 1):
            while not self._waiting and self.cursor >= len(self._order):  # the next epoch begins
                if not self._share(self.epoch + 1):
                    return None
                self.epoch, self.cursor, self._sizes = self.epoch + 1, 0, None
                self._order = self._make_order()
            sample_id = self._waiting[0] if self._waiting else SampleId(int(self._order[self.cursor]))
            if not self.lengths.knows(sample_id):
                block = self._order[self.cursor : self.cursor + self.lengths.block]  # measured together
                self.lengths.ahead([*self._waiting, *block.tolist()])
            size = self.lengths.get(sample_id)
            if size is not None:
                return sample_id, size
            self._advance()
        raise self._nothing_left()

    def _nothing_left(self) -> UserError:
        left_out = self.source.bad_rows.summary()
        return UserError(f"data.train: no usable row is left ({left_out}); see bad_rows.jsonl.")

    def _advance(self) -> None:
        """Leave the next sample behind."""
        if self._waiting:
            self._waiting.popleft()
        else:
            self.cursor += 1

    def _make_order(self) -> np.ndarray:
        order = self.source.rows.order(self.epoch, self.seed, self.shuffle, self._sizes)
        return order[: self._count(self.epoch, len(order))]

    def _share(self, epoch: int) -> float:
        """The part of an epoch that belongs to the stream."""
        return 1.0 if self.epochs is None else min(1.0, max(0.0, self.epochs - epoch))

    def _count(self, epoch: int, samples: int) -> int:
        """How many of an epoch's samples belong to the stream, its first ones."""
        return max(round(samples * self._share(epoch)), int(epoch == 0))
