"""A recorder of graphs for the CPU: what is recorded is done again at each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.graphs.recorder import Recorder
from zoo.nn.graphs.row import StaticRow
from zoo.packing import PackedLayout


class RecordedAgain(Recorder):
    """Does recorded work again, into the memory of the first time."""

    records = 0
    released = False

    def supports(self, x: Tensor) -> bool:
        return True

    @contextmanager
    def session(self, device: torch.device) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.records += 1
        out = work().clone()
        return lambda: out.copy_(work()), out

    def release(self) -> None:
        self.released = True


def go_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static row whose layout has the lengths of the row that was written last, as operations without a kernel go by them."""
    fill, lengths = StaticRow.fill, {}

    def filled(self: StaticRow, layout: PackedLayout, by_token: Any) -> None:
        fill(self, layout, by_token)
        behind = self.tokens - layout.total
        lengths[self] = (*layout.padded_lengths, *((behind,) if behind else ()))

    monkeypatch.setattr(StaticRow, "fill", filled)
    monkeypatch.setattr(StaticRow, "layout", lambda self: PackedLayout.from_lengths(lengths[self]))
