"""CUDA graphs of pieces of work that run one after another, in memory of their own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zoo.nn.graphs import random

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def release_all() -> None:
    """Give up all that any recorder of this process holds. To be called before process groups end: see `Recorder.release`."""
    for recorder in list(_recorders):
        recorder.release()


class Recorder:
    """Records work into one pool of memory.

    What a piece of work leaves alive keeps its memory; the memory of everything else serves later pieces. So graphs are replayed in the
    order in which they were recorded.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch.cuda
        self._stream: torch.cuda.Stream | None = None  # one for all sessions: libraries keep memory for each stream
        self._graphs: list[torch.cuda.CUDAGraph] = []
        _recorders.add(self)

    def supports(self, x: Tensor) -> bool:
        """Whether work on this tensor can be recorded: a GPU's."""
        return x.is_cuda

    @contextmanager
    def session(self, device: torch.device) -> Iterator[None]:
        """Work runs on a stream of its own, and is over at the end."""
        if self._stream is None:
            # PyTorch sets the context by itself, in the thread of the backward pass too, and warns of it.
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA")
            self._stream = torch.cuda.Stream(device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does the work again, and the tensor that its result stands in each time; the work itself has not run yet."""
        graph = torch.cuda.CUDAGraph()
        random.register(graph)
        # Other threads, that load data and watch over the run, may call CUDA meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        out = work()
        graph.capture_end()
        self._graphs.append(graph)
        return graph.replay, out

    def release(self) -> None:
        """Destroy all that was recorded. NCCL waits for it where a communicator is ended whose work it holds."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None  # PyTorch takes no more graphs into a pool that has lost all of its own
