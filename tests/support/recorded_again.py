"""A recorder of graphs for the CPU: what is recorded is done again at each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zoo.nn.graphs.recorder import Recorder


class RecordedAgain(Recorder):
    """Does recorded work again, into the memory of the first time."""

    records = 0

    def takes(self, x: Tensor) -> bool:
        return True

    @contextmanager
    def session(self, device: torch.device) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.records += 1
        out = work().clone()
        return lambda: out.copy_(work()), out
