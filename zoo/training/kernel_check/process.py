"""A check of a kernel in a process of its own, beside others: `python -P -m zoo.training.kernel_check.process <config.yaml> <check> <result>`.

Compiling is most of the first check on a machine, and Python compiles one kernel at a time. A kernel that ends its process is a result, too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.config.compose import load_recipe, save_recipe
from zoo.parallel.megatron.core_import import import_core, importing, leave_out_transformer_engine
from zoo.parallel.process_state import quiet
from zoo.parallel.processes import Launcher, end_with_parent
from zoo.subprocesses import find_users_modules, module_command

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.doctor.measure import Check, CheckResult

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class CheckProcesses(contextlib.ExitStack):
    """Processes that each make a check of a recipe; at the end of the block none is left."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def start(self, check: Check) -> Callable[[], CheckResult | None]:
        """Start to make a check; returns a function that waits for its result.

        A crash of the process is the check's problem. The function returns None where the process could not make it, as where a
        GPU takes one process alone or has no memory for several.
        """
        folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="zoo-check-")))
        launcher, began = self.enter_context(Launcher()), time.perf_counter()
        config, result, errors = (folder / name for name in ("config.yaml", "result", "errors"))
        save_recipe(self._recipe, config)
        with errors.open("wb") as output:
            process = subprocess.Popen(
                module_command("zoo.training.kernel_check.process", str(config), check.name, str(result)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **launcher.environment},
                pass_fds=launcher.files,
            )
        self.callback(process.wait)
        self.callback(process.kill)

        def wait() -> CheckResult | None:
            from zoo.doctor.measure import CheckResult

            code = process.wait()
            if code == 0:
                made: CheckResult = pickle.loads(result.read_bytes())
                return made if made.problem is None else None
            if -code not in CRASHES:
                return None
            said = errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            problem = f"the process that checks it ended with {signal.Signals(-code).name} ({said[-1]})"
            return CheckResult(replace(check, prepare=None), {}, problem, time.perf_counter() - began)

        return wait


def _main(config: str, name: str, result: str) -> None:
    end_with_parent()
    quiet()
    recipe = load_recipe(config)
    leave_out_transformer_engine(recipe)
    with importing(own=True):
        import_core()
        from zoo.training.kernel_check.recipes import check_recipes
    ((_, check_result),) = check_recipes([recipe], only=(name,)).results
    Path(result).write_bytes(pickle.dumps(check_result))


if __name__ == "__main__":
    find_users_modules()
    _main(*sys.argv[1:])
