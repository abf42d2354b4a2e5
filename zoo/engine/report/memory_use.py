"""The most memory that a run has taken: of the host by its largest rank, and of the fullest GPU."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zoo.engine.distributed.world import World
    from zoo.engine.report.run_log import RunLog

_STEPS = (
    2  # a process tells its memory after so many: the second has activations beside the optimizer's state
)


class MemoryUse:
    """Tells once how much memory the steps of a run take; every rank calls it alike."""

    def __init__(self, world: World) -> None:
        self._world, self._steps = world, 0

    def note(self, log: RunLog, step: int) -> None:
        """After a step of this process: in the log, and on a GPU for people too."""
        self._steps += 1
        if self._steps != _STEPS:
            return
        found = self.most()
        log.event("memory", step, **found)
        if found["peak_gib"] is not None:
            log.say(
                f"at most {found['peak_gib']:.1f} GiB of a GPU in use, {found['reserved_gib']:.1f} with the gaps between, and "
                f"{found['host_gib']:.1f} GiB of the host by a rank"
            )

    def most(self) -> dict[str, float | None]:
        """`memory` of all ranks."""
        return memory(self._world.device.type == "cuda", self._world)


def memory(on_gpu: bool, world: World | None = None) -> dict[str, float | None]:
    """Most GiB of any rank: of the host's memory, and in use and taken from a GPU since its peaks were last reset (None without a GPU)."""
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    names, peaks = ["host_gib"], [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]
    if on_gpu:
        names += ["peak_gib", "reserved_gib"]
        peaks += [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]
    if world is not None and world.size > 1:
        largest = torch.tensor(peaks, dtype=torch.float64, device=world.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        peaks = largest.tolist()
    found = dict(zip(names, (round(peak / 2**30, 2) for peak in peaks), strict=True))
    return {"peak_gib": None, "reserved_gib": None, **found}
