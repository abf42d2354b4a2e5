"""What is checked and planned before ranks are started: the recipe, this machine, the run folder and the files of data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zoo.checkpoint.integrity import damaged
from zoo.config.checks.effects import refuse_without_effect
from zoo.config.compose import is_saved_recipe
from zoo.config.derived import run_folder
from zoo.config.devices import cores, gpu_count
from zoo.config.entries import parse_entry
from zoo.config.hub import check_on_hub, check_push
from zoo.config.locate import checkpoints, is_hub_id, look, read_state
from zoo.config.resume import changes_from, refuse, refuse_unwanted
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.defaults import with_defaults
from zoo.data.sources.row_set import check_first_rows
from zoo.data.sources.tables import check_entry
from zoo.errors import ConfigError, UserError
from zoo.files import expanded
from zoo.launch.kernel_cache import keep_kernels
from zoo.launch.slurm import join_slurm
from zoo.parallel.megatron.core_import import leave_out_transformer_engine
from zoo.planner.plan_process import planned
from zoo.registry import families
from zoo.watchdog.run_lock import refuse_second


def prepare(
    recipe: Recipe, *, in_process: bool = True, meanwhile: Callable[[int], object] = lambda ranks: None
) -> tuple[Recipe, int]:
    """The validated and fully planned recipe, and its number of ranks, after a check that the files it names exist.

    Args:
        in_process: this process belongs to zoo; a single rank will run in it.
        meanwhile: called once with the number of ranks, before planning or while another process plans.

    Raises:
        ConfigError: the recipe cannot run on that many ranks or fits them under no layout, or its run folder cannot
            be one.
        UserError: a file of data.train or data.eval does not exist.
    """
    refuse_without_effect(recipe)
    join_slurm()
    ranks = world_size(recipe)
    _check_machine(recipe)
    keep_kernels()
    _check_data(recipe)
    if in_process:
        leave_out_transformer_engine(recipe)
    recipe = planned(_with_saved_batch(recipe), ranks, in_process=in_process, meanwhile=partial(meanwhile, ranks))
    recipe = validate(recipe, ranks)
    assert recipe.run.dir is not None  # derived by validate
    _check_run_dir(Path(recipe.run.dir))
    if not under_torchrun():  # there another rank of this run may hold it already
        refuse_second(Path(recipe.run.dir))
        _refuse_other_experiment(Path(recipe.run.dir), recipe)
    if recipe.hub.repo is not None and os.environ.get("RANK", "0") == "0":
        check_push(recipe.hub.repo, "hub.repo", private=recipe.hub.private)
    return recipe, ranks


def _with_saved_batch(recipe: Recipe) -> Recipe:
    """The recipe with the global batch of the run that it resumes, where another one would be planned for other ranks."""
    if "batch" not in recipe.parallel.plan or not (saved := checkpoints(expanded(run_folder(recipe)))):
        return recipe
    with contextlib.suppress(UserError, OSError):  # what can't be read is reported by the ranks
        differing = {change.key: change.old for change in changes_from(saved[-1], recipe)[1]}
        batch = differing.get("train.global_batch", recipe.train.global_batch)
        plan = [name for name in recipe.parallel.plan if name != "batch"]
        return recipe.replace({"train.global_batch": batch, "parallel.plan": plan})
    return recipe


def _check_data(recipe: Recipe) -> None:
    """UserError for files, data sets and weights that are not there, and for first rows that can't be used: before any rank is started."""
    for key, specs in (("data.train", recipe.data.train), ("data.eval", with_defaults(recipe.data).eval)):
        for spec in specs:
            entry = parse_entry(spec, key)
            check_entry(entry, key)
            if under_torchrun():  # where every rank is there already
                continue
            if entry.hub is not None:
                check_on_hub(entry.hub, "dataset", f"{key}={entry}")
            elif recipe.model.family in families() and recipe.data.on_error == "raise":
                check_first_rows(entry, recipe.data, families()[recipe.model.family].modalities, key)
    if not under_torchrun() and look(recipe.model.init) is None and is_hub_id(recipe.model.init):
        check_on_hub(recipe.model.init, "model", f"model.init={recipe.model.init}")


def _check_machine(recipe: Recipe) -> None:
    """Raise ConfigError where this machine is not the one that the recipe was planned for."""
    named, gpus_here = recipe.machine.gpus, gpu_count()
    if named is None or under_torchrun():
        return
    if recipe.machine.nodes > 1:
        raise ConfigError(
            f"hardware={recipe.hardware}: its {recipe.machine.nodes} nodes need a launcher: `zoo train --slurm-template` "
            f"writes a batch script for SLURM (others: docs/launch.md), or start torchrun on each"
        )
    if recipe.hardware != "auto" and gpus_here < min(named, recipe.nproc or named):
        raise ConfigError(
            f"hardware={recipe.hardware}: a node of it has {named} GPUs and {gpus_here} can be seen here; "
            f"hardware=auto takes what is here (zoo plan and zoo show take any)"
        )


def _check_run_dir(folder: Path) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"run.dir={folder}: {existing} is a file; wanted a folder, which need not exist yet")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={folder}: no permission to write in {existing}; give another run.dir")
    config = folder / "config.yaml"
    if config.is_file() and not is_saved_recipe(config):
        raise ConfigError(
            f"run.dir={folder}: its config.yaml was not written by a run and would be overwritten; "
            f"give a folder of its own"
        )


def _refuse_other_experiment(folder: Path, recipe: Recipe) -> None:
    """UserError where the run folder's newest checkpoint was saved under another recipe or is not wanted, as the ranks would say later.

    What can't be read is left to them: they may repair it, or take an older checkpoint.
    """
    saved_checkpoints = checkpoints(folder)
    refuse_unwanted(folder, saved_checkpoints, recipe)
    if not saved_checkpoints or recipe.run.stage is not None:
        return
    newest = saved_checkpoints[-1]
    try:
        read_state(newest)
        saved, differences = changes_from(newest, recipe)
        whole = not damaged(newest, read=False)
    except (UserError, OSError):
        return
    if whole:
        refuse(str(newest), differences, recipe, saved.get("recipe"))


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(recipe: Recipe) -> int:
    """Number of ranks of the run: that of torchrun, else `nproc`, else one per GPU, else `nproc_cpu`."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    gpus = gpu_count()
    if recipe.nproc is None:
        return gpus or min(recipe.nproc_cpu, cores())
    if gpus and recipe.nproc > gpus:
        raise ConfigError(
            f"nproc={recipe.nproc}: a rank needs a GPU of its own and {gpus} can be seen; nproc={gpus} would work"
        )
    return recipe.nproc
