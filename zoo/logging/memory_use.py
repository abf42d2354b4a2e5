"""The most memory that a run has taken: of the host by its largest rank, and of the fullest GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zoo.logging.run_log import RunLog
    from zoo.parallel.world import World

_KINDS = ("host_gib", "peak_gib", "reserved_gib")
_STEPS = 2  # a process tells its memory after so many: the second has activations beside the optimizer's state


class MemoryUse:
    """Tells once how much memory the steps of a run take; every rank calls it alike."""

    def __init__(self, world: World) -> None:
        self._world, self._steps = world, 0

    def flags(self) -> list[float]:
        """Most bytes of every rank where they are told after this step: this rank's own, 0 for the others', to be summed up."""
        if self._steps != _STEPS - 1:
            return []
        peak = _most_bytes(self._on_gpu)
        return [size * (rank == self._world.rank) for rank in range(self._world.size) for size in peak]

    def note(self, log: RunLog, step: int, totals: Sequence[float]) -> None:
        """After a step of this process: in the log, and on a GPU for people too. `totals`: begin with those of the ranks' `flags`."""
        self._steps += 1
        if self._steps != _STEPS:
            return
        kinds = len(_KINDS) if self._on_gpu else 1
        peaks = totals[: kinds * self._world.size]
        maxima = _in_gib([max(peaks[kind::kinds]) for kind in range(kinds)])
        log.event("memory", step, **maxima)
        if maxima["peak_gib"] is not None:
            log.say(
                f"at most {maxima['peak_gib']:.1f} GiB of a GPU in use, {maxima['reserved_gib']:.1f} with the gaps between, and "
                f"{maxima['host_gib']:.1f} GiB of the host by a rank"
            )

    def most(self) -> dict[str, float | None]:
        """`memory` of all ranks."""
        return memory(self._on_gpu, self._world)

    @property
    def _on_gpu(self) -> bool:
        return self._world.device.type == "cuda"


def memory(on_gpu: bool, world: World | None = None) -> dict[str, float | None]:
    """Most GiB of any rank: of the host's memory, and in use and taken from a GPU since its peaks were last reset (None without a GPU)."""
    peaks = _most_bytes(on_gpu)
    if world is not None and world.size > 1:
        largest = torch.tensor(peaks, dtype=torch.float64, device=world.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        peaks = largest.tolist()
    return _in_gib(peaks)


def _most_bytes(on_gpu: bool) -> list[float]:
    """By kind; without a GPU the host's alone."""
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if not on_gpu:
        return [host]
    return [host, float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]


def _in_gib(peaks: Sequence[float]) -> dict[str, float | None]:
    gib: dict[str, float | None] = dict.fromkeys(_KINDS)
    return gib | {name: round(peak / 2**30, 2) for name, peak in zip(_KINDS, peaks, strict=False)}
