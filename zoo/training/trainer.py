"""Training as a recipe says: `train(recipe)`, called on every rank of a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.logging.callbacks.callbacks import open_callbacks
from zoo.logging.result import TrainResult
from zoo.logging.startup_time import Startup
from zoo.parallel.determinism import refusal
from zoo.parallel.object_group import refuse_different
from zoo.parallel.signals import Interrupts, interrupts
from zoo.parallel.world import open_world
from zoo.planner.plan import refuse_misfit
from zoo.training.kernel_check.before_training import check_kernels
from zoo.training.run import Run
from zoo.watchdog.heartbeat import Watch
from zoo.watchdog.resources import explained, memory_explained
from zoo.watchdog.run_lock import RunLock


def train(recipe: Recipe, callbacks: Sequence[Any] = ()) -> TrainResult:
    """Train as the recipe says, on this rank; resumes from run.dir where it can.

    `callbacks`: objects with hooks, beside those of run.callbacks; rank 0 calls them. A finished run is left as it is. Raises
    UserError (or a subclass) for a mistake that a user can correct, and KeyboardInterrupt when it is stopped before there is anything to save.
    """
    startup = Startup("imports")
    with interrupts() as stop, explained(recipe), stop.undisguised():
        _refuse_misfit(recipe)
        check_kernels(recipe)
        try:
            return _train(recipe, stop, startup.mark("checks"), callbacks)
        finally:
            gc.collect()  # modules and process groups hold one another; a script under torchrun may train again


def _refuse_misfit(recipe: Recipe) -> None:
    """On the first rank, before anything is built: a model that can't fit. The others wait until it joins them."""
    if os.environ.get("RANK", "0") == "0":
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        refuse_misfit(validate(recipe, ranks), ranks, local)


def _train(recipe: Recipe, stop: Interrupts, startup: Startup, given: Sequence[Any]) -> TrainResult:
    with open_world(recipe) as here:
        recipe = validate(recipe, here.size)
        refuse_different(recipe)
        callbacks = open_callbacks(recipe, given, here.is_main)
        assert recipe.run.dir is not None  # derived by validate
        with (
            RunLock(Path(recipe.run.dir), here.rank, here.size) as lock,
            Watch(recipe, here, stop, lock) as watch,
            memory_explained(recipe),
        ):
            run = Run(recipe, here, stop, startup, watch.progress, callbacks)
            try:
                return run.run()
            except RuntimeError as error:
                if (refused := refusal(error)) is not None:
                    raise refused from None
                raise
            finally:
                run.release()
