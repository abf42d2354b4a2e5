"""A run's checkpoints: saved while it trains, and logged once they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.checkpoint.saver import Saver
from zoo.checkpoint.staging.copying import Copied
from zoo.config.locate import step_of
from zoo.config.schema import Recipe
from zoo.logging.callbacks.callbacks import Callbacks
from zoo.logging.messages import late_save
from zoo.logging.run_log import RunLog
from zoo.watchdog.progress import Progress

if TYPE_CHECKING:
    from zoo.checkpoint.saver import Saved
    from zoo.checkpoint.sharded_state import Trainable
    from zoo.types import JsonObject


class Saves:
    """Saves by a `Saver`, and what log, callbacks and heartbeat learn of them. Every rank makes each call."""

    def __init__(
        self, saver: Saver, log: RunLog, recipe: Recipe, progress: Progress, callbacks: Callbacks, latest: Path | None
    ) -> None:
        """`latest`: the checkpoint that the run resumes from."""
        self.saver, self.log, self.recipe = saver, log, recipe
        self.progress, self.callbacks = progress, callbacks
        self.latest = latest  # published checkpoint
        self._warned = False

    def start(self, trainable: Trainable, state: JsonObject, *, wait: bool) -> None:
        """Save while the next steps run, or, with `wait`, before anything else."""
        self.log.note("saving ...")
        self._note(self.saver.start(trainable, state))
        if wait:
            self.wait()

    def poll(self, flags: Sequence[float]) -> None:
        """After a step: log what was published since. `flags`: as `Saver.poll` takes them."""
        self._note(self.saver.poll(flags), flags)
        self.expect(self.saver.expected_seconds)

    def wait(self) -> None:
        """Wait for the save that is being written."""
        self._note(self.saver.wait(self._show))

    def finish(self) -> None:
        """Wait until every save is in the run folder."""
        self.saver.close(self._show, self.log.say)
        self._note(None)

    def expect(self, seconds: float | None, about: str = "about ") -> None:
        """Warn once where a save takes `seconds`, None while that is not known, and `run.save_within` allows fewer."""
        late = None if seconds is None or self._warned else late_save(seconds, self.recipe, about)
        if late is not None:
            self._warned = True
            self.log.say(late)

    def log_published(self, saved: Saved | Copied) -> None:
        """Log a checkpoint that has been published, or that has come from the stage to the run folder."""
        facts: JsonObject = {"path": str(saved.folder), "bytes": saved.size}
        if isinstance(saved, Copied):
            self.log.event("copied", saved.step, copy_ms=round(saved.seconds * 1e3, 1), **facts)
            return
        waited, wrote = round(saved.stall_seconds * 1e3, 1), round(saved.write_seconds * 1e3, 1)
        staged = {"staged": True} if saved.staged else {}
        self.log.event("save", saved.step, stall_ms=waited, write_ms=wrote, **facts, **staged)
        self.expect(saved.stall_seconds + saved.write_seconds, "")

    def _note(self, saved: Saved | None, flags: Sequence[float] | None = None) -> None:
        for published in self.saver.news(saved, flags):
            self.log_published(published)
            step, folder, staged = published.step, published.folder, published.staged
            if not staged:
                self.callbacks.save(step, folder)
            if self.latest is None or step_of(self.latest) <= step:
                self.latest, self.progress.staged = folder, (step, folder) if staged else None

    def _show(self) -> None:
        """Show how much of the save that the run waits for is written."""
        if self.log.main and (saving := self.saver.under_way()) is not None:
            self.log.note(f"{saving} ...")
