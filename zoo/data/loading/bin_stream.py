"""`BinStream`: the endless stream of bins, lists of visits to rows, that every rank plans alike."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from zoo.data.loading.lengths import Lengths
from zoo.data.sources.mixture import STREAM_ROWS
from zoo.errors import UserError
from zoo.packing import BinPacker


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
        self._sizes: list[int | None] | None = (
            None  # of the source when this epoch began, where it has grown since
        )
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
            "sizes": self._sizes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.source.load_stream_state(state.get("streams", {}))
        self.lengths.load_state_dict(state["corrected"])
        self.rewind(state)

    def grown(self, state: dict[str, Any], sizes: list[int | None]) -> dict[str, Any]:
        """A saved state for the source as it is now, where its parts had these sizes: the same rows by their new numbers.

        The epoch at hand goes on with the rows that it began with; the others join in the next one.
        """
        rows = sum(STREAM_ROWS if size is None else size for size in sizes)

        def visit(old: int) -> int:
            return self.source.renumber([old], sizes)[0]

        def key(old: int) -> int:  # of a variant and a row
            variant, row = divmod(old, rows)
            return variant * len(self.source) + visit(row)

        packer = state["packer"]
        if packer is not None:
            packer = {**packer, "items": [[visit(item[0]), *item[1:]] for item in packer["items"]]}
        return {
            **state,
            "packer": packer,
            "waiting": [visit(old) for old in state["waiting"]],
            "corrected": [[key(old), *found] for old, *found in state["corrected"]],
            "sizes": state.get("sizes") or sizes,
        }

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to a state; rows that it holds and that were corrected since then are taken as they are now."""
        self.epoch, self.cursor, self._sizes = state["epoch"], state["cursor"], state.get("sizes")
        self._order = self._make_order()
        self._waiting = deque(state["waiting"])
        held = state["packer"] or {"items": [], "seen": [0, 0]}
        sizes = {visit: (tokens, cost) for visit, tokens, cost in held["items"]}
        if self.packer is None or state["packing"] != self._packing:
            self._waiting.extendleft(reversed(sizes))
            if self.packer is not None:
                self.packer.load_state_dict({"items": [], "seen": [0, 0]})
            return
        self.lengths.remember(sizes)
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
                self.epoch, self.cursor, self._sizes = self.epoch + 1, 0, None
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
        return self.source.order(self.epoch, self.seed, self.shuffle, self._sizes)
