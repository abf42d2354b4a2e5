"""CPU time of a job and its result, both sides together: zoo's worker processes, pebble's pool and torch's DataLoader.

pip install pebble && python -m benchmarks.worker_pools
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import socket
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zoo.data.media.worker_sockets import MessageSocket, WorkerProcess
from zoo.subprocesses import module_command

SIZES = ((100, 300), (2**19, 100), (60 * 2**20, 5))  # bytes of a result, jobs


def make(size: int) -> np.ndarray:
    """A result of `size` bytes."""
    return np.full(size, 7, np.uint8)


class Results(Dataset[torch.Tensor]):
    """Results as a data set."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(make(self.size))


def run_zoo(size: int, count: int) -> None:
    """`count` jobs by a worker process of zoo."""
    worker = WorkerProcess.start(module_command("benchmarks.worker_pools", "serve"))
    for _ in range(count):
        worker.channels[0].send(size)
        assert worker.channels[0].receive(np.ndarray)[0][-1] == 7
    worker.end()


def run_pebble(size: int, count: int) -> None:
    """The same by pebble."""
    spawn = multiprocessing.get_context("spawn")
    with importlib.import_module("pebble").ProcessPool(max_workers=1, context=spawn) as pool:
        for _ in range(count):
            assert pool.schedule(make, args=[size], timeout=30).result()[-1] == 7


def run_torch(size: int, count: int) -> None:
    """The same by torch's DataLoader, which has no limit of time for a row."""
    data = Results(size, count)
    loader = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=1, multiprocessing_context="spawn")
    assert all(result[-1] == 7 for result in loader)


def cpu_seconds(run: Callable[[int, int], None], size: int, count: int) -> float:
    """CPU time of this process and of its ended children for a run."""

    def spent() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    begin = spent()
    run(size, count)
    return spent() - begin


def main() -> None:
    """Serve as a worker of zoo, or measure all."""
    if sys.argv[1:2] == ["serve"]:
        sys.argv.pop(1)
        channel = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
        while True:
            channel.send(make(channel.receive(int)[0]))
    for size, count in SIZES:
        for name, run in (("zoo", run_zoo), ("pebble", run_pebble), ("torch", run_torch)):
            start = min(cpu_seconds(run, size, 2) for _ in range(2))
            cost = (min(cpu_seconds(run, size, count + 2) for _ in range(2)) - start) / count
            print(f"{name:7}{size:10} B{cost * 1e6:9.0f} us", flush=True)


if __name__ == "__main__":
    main()
