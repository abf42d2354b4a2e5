"""Chooses the keys of `parallel.plan`, in a process of its own where several ranks are to be started on GPUs.

Planning needs a model's code, and would occupy some memory of a GPU for as long as the run lasts; so the process that
starts the ranks stays light and imports no torch. A single rank runs in that process and needs the code itself.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zoo.config.compose import load_recipe, save_recipe
from zoo.config.devices import gpu_count
from zoo.config.memory import host_memory
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.parallel.megatron.core_import import importing, leave_out_transformer_engine
from zoo.parallel.processes import Launcher, end_with_parent
from zoo.subprocesses import module_command


def planned(
    recipe: Recipe, ranks: int, *, in_process: bool = True, meanwhile: Callable[[], object] = lambda: None
) -> Recipe:
    """The recipe with the keys of `parallel.plan` chosen for so many ranks, and none left in it.

    Args:
        in_process: a single rank will run in this process, which may take memory of a GPU.
        meanwhile: called once, while another process plans, or before this one does.

    Raises:
        UserError: nothing fits; the message names settings that would.
    """
    if not recipe.parallel.plan:
        meanwhile()
        return recipe
    machine = recipe.machine
    if gpu_count() and machine.host_memory_gb is None and (memory := host_memory()):
        recipe = replace(recipe, machine=replace(machine, host_memory_gb=memory / 1e9))
    if (ranks == 1 and in_process) or not gpu_count():
        meanwhile()
        chosen = _choose(recipe, ranks)
    else:
        chosen = _choose_elsewhere(recipe, ranks, meanwhile)
    return replace(chosen, machine=machine)


def _choose_elsewhere(recipe: Recipe, ranks: int, meanwhile: Callable[[], object]) -> Recipe:
    """What another process chooses, which sees no GPU."""
    with tempfile.TemporaryDirectory(prefix="zoo-plan-") as folder:
        config, result = Path(folder) / "config.yaml", Path(folder) / "result"
        save_recipe(recipe, config)
        command = module_command("zoo.planner.plan_process", str(config), str(ranks), str(result))
        with Launcher() as launcher:
            env = {**os.environ, **launcher.environment, "CUDA_VISIBLE_DEVICES": ""}
            with subprocess.Popen(
                command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, pass_fds=launcher.files
            ) as process:
                try:
                    meanwhile()
                    _, errors = process.communicate()
                except BaseException:  # a signal, too
                    process.kill()
                    raise
        if not result.is_file():
            raise RuntimeError(f"planning failed: {errors[-2000:]}")
        chosen = pickle.loads(result.read_bytes())
    if isinstance(chosen, str):
        raise UserError(chosen)
    assert isinstance(chosen, Recipe)
    return chosen


def _choose(recipe: Recipe, ranks: int) -> Recipe:
    with importing():
        from zoo.planner.plan import choose_layout_here

        return choose_layout_here(recipe, ranks)


def _main(config: str, ranks: str, result: str) -> None:
    """Choose, and write the recipe or the message of the error to a file."""
    end_with_parent()
    leave_out_transformer_engine()
    try:
        chosen: Recipe | str = _choose(load_recipe(config), int(ranks))
    except UserError as error:
        chosen = str(error)
    Path(result).write_bytes(pickle.dumps(chosen))


if __name__ == "__main__":
    _main(*sys.argv[1:])
