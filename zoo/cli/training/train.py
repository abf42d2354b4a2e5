"""
usage: zoo train recipe=NAME [key=value ...] [--slurm-template]

Trains from a recipe: a name that `zoo list` shows, or the path of a YAML file (also a run's config.yaml). `zoo train my.yaml`
and `zoo train recipe=my.yaml` are the same.

  size=SIZE          a size of the family; default: the published size on a GPU, tiny without
  hardware=NAME      what it runs on: 8xh200, 2x8xh100 (nodes, GPUs, kind), auto, cpu; parallel sizes that are not
                     given are chosen so that the model fits
  nproc=N            ranks on this machine; default: one a GPU, or nproc_cpu without
  train.steps=100    any key of the recipe (`zoo show --schema`), also as --train.steps=100 or --train.steps 100
  run.dir=FOLDER     the run folder; a run that was stopped resumes from there

Exit codes: 0 done, 2 a mistake that you can fix, 130 Ctrl-C, 75 SIGTERM, SIGUSR1, SIGHUP or SIGQUIT (start the same command
again), 76 left because a rank died or hangs.

Under torchrun (`torchrun --nproc-per-node 8 -m zoo train ...`) and under SLURM (`srun zoo train ...`) each process is a
rank. --slurm-template trains nothing: it writes a batch script for these arguments, to be submitted by sbatch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_recipe

if TYPE_CHECKING:
    from zoo.config.schema import Recipe


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say; 0 when the run came to its end, 130 when it was interrupted, 75 when it was preempted."""
    from zoo.engine.distributed.signals import interrupts
    from zoo.engine.report.terminal import live_terminal

    with interrupts(), live_terminal():  # from the first second on
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    flags, rest = split_flags(arguments, ("--slurm-template",))
    name, overrides = split_recipe(rest, "zoo train recipe=NAME")

    from zoo.config.compose import resolve
    from zoo.engine.launch.launcher import launch
    from zoo.engine.report.startup_time import note_command
    from zoo.engine.report.terminal import doing

    note_command()
    resolved = resolve(name, overrides)
    if "--slurm-template" in flags:
        return _template(resolved.recipe, rest)
    doing("planning" if resolved.recipe.parallel.plan else "checking the recipe and its data")

    def announce(recipe: Recipe, ranks: int) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        print(_headline(recipe, resolved.size_why, ranks), flush=True)
        if resolved.taken:
            print(f"zoo: {resolved.taken}", flush=True)
        if resolved.recipe.parallel.plan:
            chosen = _planned(resolved.recipe, recipe)
            print(f"zoo: planned for {recipe.hardware or 'these ranks'}: {chosen}", flush=True)

    return launch(resolved.recipe, here=True, announce=announce).code


def _template(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Write a batch script, after the checks that a run would make; hardware= says of how many nodes and GPUs."""
    from zoo.cli.recipes.plan import planned_ranks
    from zoo.config.validate import validate
    from zoo.engine.launch.slurm import write_template
    from zoo.engine.planning.plan_process import planned

    ranks = planned_ranks(recipe)
    recipe = validate(planned(recipe, ranks), ranks)
    path = write_template(recipe, arguments, ranks)
    print(f"wrote {path}: {recipe.machine.nodes} x {ranks // recipe.machine.nodes} ranks; sbatch {path}")
    return 0


def _planned(before: Recipe, after: Recipe) -> str:
    """The keys that planning has set, and to what."""
    from zoo.config.compose import PLANNED_KEYS

    shown = []
    for name in before.parallel.plan:
        for full in PLANNED_KEYS.get(name, (f"parallel.{name}",)):
            section, _, key = full.partition(".")
            old, new = (getattr(getattr(recipe, section), key) for recipe in (before, after))
            if new != old:
                shown.append(f"{full}={new}")
    return " ".join(shown) or "nothing has to be cut"


def _headline(recipe: Recipe, size_why: str, ranks: int) -> str:
    """The first line of a run: what will be trained, on what, and where to."""
    from zoo.config.derived import data_parallel

    sizes = {name: getattr(recipe.parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    shown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    shown.append(f"dp={data_parallel(recipe, ranks)}")
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"zoo: recipe {recipe.recipe} | size {recipe.size or '-'} ({size_why}) | family {recipe.model.family} | "
        f"weights {recipe.model.init} | {_evaluation(recipe)} | {count} ({' '.join(shown)}) | {recipe.run.dir}"
    )


def _evaluation(recipe: Recipe) -> str:
    """On what a run evaluates, or why on nothing."""
    from zoo.data.loading.defaults import evaluated_on

    names = evaluated_on(recipe.data)
    if names and recipe.train.eval_rows != 0:
        return f"evaluates on {', '.join(names)}"
    if names:
        return "no evaluation (train.eval_rows=0)"
    if recipe.data.eval:
        return (
            "no evaluation (data.eval=FILE gives one, and so does held_out: 0.05 in an entry of data.train)"
        )
    return "no evaluation (data.eval=none)"
