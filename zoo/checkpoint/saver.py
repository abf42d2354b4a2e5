"""`Saver`: saves while training goes on. A save is a copy between two steps and a thread that writes the copy.

A thread, not a fork: a forked child inherits locks that threads of CUDA, NCCL, gloo and the data loader may hold, and a
CUDA context that it must not touch; a spawned process would have to be handed all tensors. Writing to a file and
summing it up happen outside of Python's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo.checkpoint import integrity
from zoo.checkpoint.progress import PARTIAL, Saving, saving
from zoo.checkpoint.selection import prune
from zoo.checkpoint.sharded_state import Trainable, to_write
from zoo.checkpoint.staging.copying import Copied, Copier
from zoo.checkpoint.staging.stage import Stage
from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.writer import ControlGroup, SaveRequest, write
from zoo.config.derived import STAGED
from zoo.config.schema import Recipe
from zoo.logging.messages import at_last_copy
from zoo.logging.result import records
from zoo.parallel.world import TIMEOUT, World, cores_beside_gpu
from zoo.types import JsonObject

_WORTH_A_TEST = 2**30  # bytes of a save that may last
LEAVE_SECONDS = 10.0  # how long a run that fails waits for a save that is being written


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is published: in the run folder, or in its stage."""

    folder: Path
    step: int
    stall_seconds: float  # training waited so long
    write_seconds: float  # until it was published, beside training
    size: int = 0  # bytes of all ranks
    staged: bool = False  # it lies in run.stage, and is copied on


class Saver:
    """One save at a time; all methods are called by all ranks alike, between the same steps."""

    def __init__(
        self, recipe: Recipe, world: World, save_files: Callable[[Path], None],
        tick: Callable[[], None] = lambda: None, stage: Stage | None = None,
    ) -> None:  # fmt: skip
        """`save_files` writes config.json and the processor's files into a folder; `tick` is called as a save gets on."""
        self._tick = tick
        assert recipe.run.dir is not None
        self._recipe, self._world, self._hf = recipe, world, integrity.CachedFiles(save_files)
        self._run_dir = Path(recipe.run.dir)
        self._stage, self._copier = stage, Copier(stage, recipe) if stage else None
        self._written = stage.folder if stage else self._run_dir
        self._folder = self._run_dir / "checkpoints"
        self._copied = CpuCopy(world.device, cores_beside_gpu(recipe, world) or 1)
        self.expected_seconds: float | None = None  # of a save, before the first one; known on the first rank
        self._control: ControlGroup | None = None
        self._writing: _Writing | None = None
        self._prepared = False

    def prepare(self, trainable: Trainable) -> None:
        """After the first step, which has made the optimizer's state, and no later one: take the memory for saves while further ones run."""
        if self._prepared:
            return
        self._prepared = True
        state = to_write(trainable, self._world, optimizer=self._recipe.train.save == "full")
        size = float(self._copied.prepare(state.pieces, state.objects))
        total = self._world.sum([size])[0] if self._world.size > 1 else size
        if self._world.is_main and total > _WORTH_A_TEST:
            threading.Thread(target=self._expect, args=(total,), name="zoo-save-test", daemon=True).start()

    def _expect(self, total: float) -> None:
        """Estimate how long a save takes, by the rate of the run's last one or by a short test of the disk."""
        saves = [line for line in records(self._run_dir) if line.get("event") == "save" and line.get("bytes")]
        saves = [line for line in saves if bool(line.get("staged")) == (self._stage is not None)]
        folder = self._written / "checkpoints"
        with contextlib.suppress(OSError):  # the first save says so
            folder.mkdir(parents=True, exist_ok=True)
            rate = saves[-1]["bytes"] / saves[-1]["write_ms"] * 1e3 if saves else disk.rate(folder)
            self.expected_seconds = total / rate

    def start(self, trainable: Trainable, state: JsonObject) -> Saved | None:
        """Copy the state of `state["step"]`, and write it beside what comes. An earlier save is waited for.

        So are copies from the stage, until no more than one checkpoint is left there.

        Returns that earlier one, if it was not yet reported. Raises what has failed while it was written.
        """
        began = time.monotonic()
        former = self.wait()
        if self._copier is not None:
            self._copier.wait(STAGED - 1)
        if self._control is None:
            self._control = ControlGroup(TIMEOUT, self._tick)
            if self._world.is_main:  # what a killed run has left
                integrity.remove(self._folder.glob(PARTIAL + "*"))
        full = self._recipe.train.save == "full"
        held = to_write(trainable, self._world, optimizer=full)
        self._copied.take(held.pieces, held.objects)
        state = {**state, "ranks": self._world.size, "scheduler": trainable.scheduler.state_dict(), "optimizer": full}
        stage = (self._stage.folder, self._stage.sharing) if self._stage else ()
        request = SaveRequest(self._run_dir, state, self._recipe, self._hf, self._tick, *stage)
        self._writing = _Writing(self._copied, request, self._control, began, self._world.device)
        return former

    def before_update(self) -> None:
        """Before anything changes weights or optimizer state: a copy that is under way ends first."""
        if self._writing is not None:
            self._copied.before_update()

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank's copy takes."""
        return self._copied.size

    def under_way(self) -> Saving | None:
        """How far the save is that is being written, or else the copy from the stage."""
        if self._writing is not None:
            return saving(self._written)
        return self._copier.under_way() if self._copier is not None else None

    def flags(self) -> list[float]:
        """Whether this rank's save has ended, or failed, and whether its copy from the stage has."""
        writing, copier = self._writing, self._copier
        saved = (writing.ended, writing.ended and writing.error is not None) if writing else (False, False)
        copied = (copier.ready, copier.error is not None) if copier else (False, False)
        return [float(flag) for flag in (*saved, *copied)]

    def _flags_of_all(self) -> Sequence[float]:
        return self.flags() if self._world.size == 1 else self._world.sum(self.flags())

    def poll(self, flags: Sequence[float] | None = None) -> Saved | None:
        """The save that was published since the last call, if one was; raises what has failed. Called after each step.

        `flags`: ends with the sums of all ranks' `flags`, as of this step; without them they are exchanged now.
        """
        if self._writing is None:
            return None
        ended, failed, *_ = self._flags_of_all() if flags is None else flags[-4:]
        return self.wait() if failed or ended == self._world.size else None

    def wait(self, show: Callable[[], None] = lambda: None) -> Saved | None:
        """The same, when it is done; `show` is called every second meanwhile."""
        writing = self._writing
        if writing is None:
            return None
        while not writing.ended:
            writing.thread.join(1.0)
            show()
        self._writing = None
        saved = writing.result()
        if self._copier is not None:
            self._copier.put(saved.folder.name)
        return saved

    def news(self, saved: Saved | None, flags: Sequence[float] | None = None) -> Iterator[Saved | Copied]:
        """`saved`, and then the checkpoints that have come from the stage to the run folder; raises what has failed.

        Every rank takes all of it, after each step. `flags`: as `poll` takes them.
        """
        if saved is not None:
            yield saved
        while self._copier is not None and self._copier.unreported:
            *_, ready, failed = self._flags_of_all() if flags is None else flags
            if not failed and ready != self._world.size:
                return
            yield self._copier.take()
            flags = None

    def close(self, show: Callable[[], None] = lambda: None, log: Callable[[str], None] = lambda text: None) -> None:
        """After the last save: copies end, and the best checkpoint may be another one.

        `show` is called every second of the wait, `log` once where there is one.
        """
        self.wait()
        if self._copier is not None and self._copier.left:
            log(at_last_copy(self._run_dir, self._written))
            self._copier.wait(0, show)
        if self._world.is_main:
            integrity.remove(self._folder.glob(PARTIAL + "*"))
            prune(self._run_dir, self._recipe.train.keep, self._recipe.train.keep_best)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """On the way out of a run that has failed, give a save that is being written a little time."""
        if kind is not None and self._writing is not None:
            self._writing.thread.join(LEAVE_SECONDS)
        if self._writing is None or self._writing.ended:
            self._copied.release()


class _Writing:
    """A thread that writes one checkpoint."""

    def __init__(
        self, copied: CpuCopy, request: SaveRequest, control: ControlGroup, began: float, device: torch.device
    ) -> None:
        self._request = request
        self._began, self._copied = began, time.monotonic()
        self._published = 0.0  # when the checkpoint was there
        self._size = 0
        self.ended = False  # when those that are not kept are gone
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(copied, control, device), name="zoo-save", daemon=True)
        self.thread.start()

    def _run(self, copied: CpuCopy, control: ControlGroup, device: torch.device) -> None:
        def published() -> None:
            self._published = time.monotonic()

        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread has the first one
            self._size = write(copied, self._request, control, published)
        except Exception as error:
            self.error = error
        self.ended = True

    def result(self) -> Saved:
        """The checkpoint, when it is published; raises what has failed."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        request, stall, wrote = self._request, self._copied - self._began, self._published - self._copied
        return Saved(request.target, request.state["step"], stall, wrote, self._size, request.stage is not None)
