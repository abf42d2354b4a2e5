"""`Copier`: a thread of each rank that copies staged checkpoints on to the run folder, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from zoo.checkpoint.progress import Saving
from zoo.checkpoint.staging.copying import Copied, Meter, copy_checkpoint
from zoo.checkpoint.staging.stage import Stage
from zoo.config.schema import Recipe


class Copier:
    """All methods are called by all ranks alike, in the same order."""

    def __init__(self, stage: Stage, recipe: Recipe) -> None:
        self.stage, self._recipe = stage, recipe
        self._meter = Meter()
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitted = self._reported = 0
        self._copied: list[Copied] = []
        self.error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, name: str) -> None:
        """Copy a staged checkpoint after those that were given before."""
        self._submitted += 1
        self._orders.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zoo-save-copy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            name = self._orders.get()
            error, copied = None, None
            try:
                copied = copy_checkpoint(self.stage, name, self._recipe, self._meter)
            except Exception as raised:
                error = raised
            with self._changed:
                self.error = error
                self._copied += [copied] if copied else []
                self._changed.notify_all()
            if error is not None:
                return

    @property
    def unreported(self) -> bool:
        """Whether a checkpoint was given that `take` has not told of; the same on all ranks."""
        return self._reported < self._submitted

    @property
    def left(self) -> int:
        """Checkpoints that are not copied yet, as this rank sees it."""
        return self._submitted - len(self._copied)

    @property
    def ready(self) -> bool:
        """Whether `take` has one to tell of, on this rank."""
        return self._reported < len(self._copied)

    def take(self) -> Copied:
        """The next checkpoint that was copied; waits for it. Raises what has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self.error is not None)
        if not self.ready and self.error is not None:
            raise self.error
        self._reported += 1
        return self._copied[self._reported - 1]

    def wait(self, most: int, show: Callable[[], None] = lambda: None) -> None:
        """Until at most so many are left; `show` is called every second meanwhile. Raises what has failed."""
        while self.left > most:
            with self._changed:
                self._changed.wait_for(lambda: self.left <= most or self.error is not None, 1.0)
            if self.left > most and self.error is not None:  # one that need not be waited for is raised later
                raise self.error
            show()

    def under_way(self) -> Saving | None:
        """How far the copy is that is being made, as this rank sees it."""
        return self._meter.state() if self.left else None
