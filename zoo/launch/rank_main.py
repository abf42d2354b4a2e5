"""One rank of a run: `python -P -m zoo.launch.rank_main <resolved config.yaml> [<task> <file for its result> [<JSON>]]`,
or `... <resolved config.yaml> [--asked <config.yaml that is being planned>] [--callbacks <file>]`.

Started by :mod:`zoo.launch.launcher`; without a task it trains. With `--asked` it imports what that recipe needs, and then
waits for the resolved one.

Exit codes: 0 done, 2 a user's mistake (one line), 130 interrupted and 75 preempted (after saving), 76 left because of
another rank (see :mod:`zoo.watchdog.heartbeat`), 1 for anything else (a traceback).
Line and traceback go to the file that ZOO_FAILURE_LOG names, else to stderr: a rank can't know whether it failed by
itself or because of another one, the launcher can.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import user_code
from zoo.data.loading import worker_processes
from zoo.errors import UserError, file_error
from zoo.logging.terminal import live_terminal
from zoo.parallel.megatron.core_import import import_core, importing, leave_out_transformer_engine
from zoo.parallel.process_state import quiet
from zoo.parallel.processes import CALLED_SUFFIX, FAILURE_LOG, end_with, end_with_parent
from zoo.parallel.signals import INTERRUPTED, PREEMPTED, Preempted, interrupts
from zoo.subprocesses import find_users_modules

if TYPE_CHECKING:
    from zoo.config.schema import Recipe

_POLL_SECONDS = 0.01  # between two looks for the recipe


def main(argv: list[str] | None = None) -> int:
    """Train, or do another task, as the rank that the environment names; returns the exit code."""
    path, *task = sys.argv[1:] if argv is None else argv
    end_with_parent()
    quiet()
    if (log := os.environ.get(FAILURE_LOG)) is not None:
        user_code.record(Path(log).with_suffix(CALLED_SUFFIX))
    if task and not task[0].startswith("--"):
        return _ended(lambda: _do(path, *task))
    return _ended(lambda: _train(path, dict(zip(task[::2], task[1::2], strict=True))))


def _ended(work: Callable[[], int]) -> int:
    """The exit code of a rank that does this; what has failed is left for the launcher."""
    try:
        with interrupts() as stop, stop.re_raise_signal():  # importing the loop takes seconds
            code = work()
        user_code.forget()
        return code
    except KeyboardInterrupt as error:
        return PREEMPTED if isinstance(error, Preempted) else INTERRUPTED
    except Exception as error:
        mistake = file_error(error) if isinstance(error, OSError) else error if isinstance(error, UserError) else None
        text = traceback.format_exc() if mistake is None else f"zoo: error: {mistake}\n"
        if (log := os.environ.get(FAILURE_LOG)) is None:
            sys.stderr.write(text)
        else:
            with open(log, "a", encoding="utf-8") as file:
                file.write(text)
        return 1 if mistake is None else 2


@worker_processes.ended()
def _train(path: str, files: Mapping[str, str]) -> int:
    """Train; the exit code."""
    with importing(own=True):
        _import_for(files.get("--asked", path), encodes=True)
        from zoo.training.trainer import run_rank
    recipe, callbacks = _planned(Path(path)), list[object]()
    if "--callbacks" in files and os.environ.get("RANK", "0") == "0":  # which has them alone
        from zoo.launch.callback_copies import read_copies

        callbacks = read_copies(files["--callbacks"])
    with live_terminal():
        return run_rank(recipe, callbacks).code


def _import_for(path: str, *, encodes: bool = False) -> Recipe:
    """Import what a run of the recipe in that file needs; the recipe. `encodes`: with workers, which import meanwhile."""
    from zoo.config.compose import load_recipe

    recipe = load_recipe(path)
    if encodes:
        worker_processes.start_ahead(recipe.data)
    leave_out_transformer_engine(recipe)
    import_core()
    return recipe


def _planned(path: Path) -> Recipe:
    """The recipe in a file, as soon as it is there. A rank whose launcher is gone ends (`end_with_parent`)."""
    from zoo.config.compose import load_recipe

    while not path.exists():
        time.sleep(_POLL_SECONDS)
    return load_recipe(path)


def _do(path: str, task: str, result: str, *argument: str) -> int:
    """Call the function `module:name`, with a further argument if there is one; rank 0 leaves its result in the file."""
    with importing(own=True):
        recipe = _import_for(path)
    module, _, name = task.partition(":")
    value = getattr(importlib.import_module(module), name)(recipe, *map(json.loads, argument))
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_bytes(pickle.dumps(value))
    return 0


if __name__ == "__main__":
    find_users_modules()
    end_with(main())
