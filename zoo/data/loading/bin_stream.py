"""`BinStream`: the endless stream of bins, lists of sample ids, that every rank plans alike."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from zoo.data.loading.lengths import Lengths, Size
from zoo.data.sources.mixture import STREAM_ROWS, SampleId
from zoo.errors import UserError
from zoo.packing import BinPacker


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
    """

    epoch: int
    cursor: int
    waiting: list[SampleId]
    packing: list[int] | None
    packer: dict[str, Any] | None
    sizes: list[int | None] | None = None

    @classmethod
    def of(cls, state: dict[str, Any]) -> Position:
        """The position that a saved state holds."""
        return cls(**{field.name: state[field.name] for field in fields(cls) if field.name in state})


class BinStream:
    """The endless stream of bins (lists of sample ids): epochs of a source, packed or in groups.

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
        self.lengths = lengths
        self.source = lengths.source
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.seed = seed
        self.packer = BinPacker[SampleId](budget, align, lookahead) if mode == "thd" else None
        self.epoch = 0
        self.cursor = 0  # samples of this epoch's order that were read
        self._waiting: deque[SampleId] = deque()  # see `Position`
        self._sizes: list[int | None] | None = None  # see `Position`
        self._order = self._make_order()

    def next_bin(self) -> list[SampleId]:
        """Samples of the next bin, in order."""
        if self.packer is None:
            return [self._next_sample()[0] for _ in range(self.micro_batch)]
        while not self.packer.ready():
            sample_id, size = self._next_sample()
            self.packer.add(sample_id, size.tokens, size.cost)
        return self.packer.pop()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain values: its position, corrected lengths, and places in streams of rows."""
        streams = self.source.rows.stream_state(self._wanted())
        return {
            **vars(self.position()),
            "corrected": self.lengths.state_dict(),
            "streams": streams,
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
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.source.rows.load_stream_state(state.get("streams", {}))
        now = self.source.sizes_follow_from()
        if all(old == new for old, new in zip(state.get("sizes_of", now), now, strict=False)):
            self.lengths.load_state_dict(state["corrected"])
        self.rewind(Position.of(state))

    def grown(self, state: dict[str, Any], sizes: list[int | None]) -> dict[str, Any]:
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
            "corrected": [[key(old), *found] for old, *found in state["corrected"]],
            "sizes": state.get("sizes") or sizes,
        }

    def rewind(self, position: Position) -> None:
        """Go back to a position; samples that it holds and that were corrected since then have their corrected sizes."""
        self.epoch, self.cursor, self._sizes = position.epoch, position.cursor, position.sizes
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

    @property
    def _packing(self) -> list[int] | None:
        """What makes the items of one packer fit another."""
        return None if self.packer is None else [self.packer.budget, self.packer.align]

    def _next_sample(self) -> tuple[SampleId, Size]:
        """The next sample whose row can be used, and its size."""
        for _ in range(2 * len(self.source) + len(self._waiting) + 1):
            while not self._waiting and self.cursor == len(self._order):
                self.epoch, self.cursor, self._sizes = self.epoch + 1, 0, None
                self._order = self._make_order()
            sample_id = self._waiting[0] if self._waiting else SampleId(int(self._order[self.cursor]))
            if not self.lengths.knows(sample_id):
                self.lengths.ahead(self._coming())
            if self._waiting:
                self._waiting.popleft()
            else:
                self.cursor += 1
            size = self.lengths.get(sample_id)
            if size is not None:
                return sample_id, size
        left_out = self.source.bad_rows.summary()
        raise UserError(f"data.train: no usable row is left ({left_out}); see bad_rows.jsonl.")

    def _coming(self) -> list[SampleId]:
        """The next samples of this epoch, a block to measure together."""
        end = min(self.cursor + self.lengths.block, len(self._order))
        return [*self._waiting, *self._order[self.cursor : end].tolist()]

    def _make_order(self) -> np.ndarray:
        return self.source.rows.order(self.epoch, self.seed, self.shuffle, self._sizes)
