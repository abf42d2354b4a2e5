"""Ranks that count what they send one another."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.rank_tasks import train

CALLS = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list",
    "gather_object", "barrier",
)  # fmt: skip
OF_A_LAYER = ("zoo/nn/", "tensor_parallel/", "core/distributed/", "pipeline_parallel/", "core/transformer/", "core/utils.py")  # fmt: skip


def train_counting(rank: int, size: int, overrides: Sequence[str]) -> list[list[str]]:
    """`train`; by step but the first, the files that called a collective of the main thread, but for those of layers.

    From the end of a step's line in the log to that of the next one.
    """
    from zoo.training.trainer import Trainer

    steps: list[list[str]] = [[]]
    log_step = Trainer.log_step

    def counted(name: str) -> Any:
        call, main = getattr(dist, name), threading.current_thread()

        def counting(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if "torch/distributed" in caller:  # of another collective
                return call(*args, **options)
            of_layer = any(part in caller for part in OF_A_LAYER) and "moe_logging" not in caller
            if threading.current_thread() is main and not of_layer:
                steps[-1].append(caller.rpartition("/")[2])
            return call(*args, **options)

        return counting

    def next_step(run: Trainer, result: Any) -> None:
        log_step(run, result)
        steps.append([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "log_step", next_step)
        for name in CALLS:
            patch.setattr(dist, name, counted(name))
        train(rank, size, overrides)
    return steps[2:-1]


def exchange_values(rank: int, size: int) -> tuple[int, list[list[Any]]]:
    """The connections that an ObjectGroup takes this rank, and what its ranks have told one another through it."""
    from zoo.parallel.object_group import ObjectGroup

    dist.init_process_group("gloo")
    try:
        dist.barrier()
        before = _connections()
        group = ObjectGroup()
        told = [group.gather((rank, "x" * rank)), group.collect(rank), ObjectGroup().gather(rank)]
        return len(_connections() - before) // 2, told  # of two groups
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _connections() -> set[str]:
    """Inodes of this process's established TCP connections."""
    established = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            established |= {fields[9]} if fields[3] == "01" else set()
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    return own & established
