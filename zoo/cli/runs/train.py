"""
usage: zoo train recipe=NAME [key=value ...] [--slurm-template | --kubernetes-template | --jobset-template | --skypilot-template]

Trains from a recipe: a name that `zoo list` shows, or the path of a YAML file (also a run's config.yaml). `zoo train my.yaml`
and `zoo train recipe=my.yaml` are the same.

  family=NAME task=NAME adapter=NAME   a recipe by its parts: qwen3_vl, dpo and lora are recipe=qwen3_vl_dpo_lora; task and adapter
                     also replace those of a recipe that is named
  size=SIZE          a size of the family; default: the published size on a GPU, tiny without
  hardware=NAME      what it runs on: 8xh200, 2x8xh100 (nodes, GPUs, kind), auto, cpu; parallel sizes that are not
                     given are chosen so that the model fits
  nproc=N            ranks on this machine; default: one a GPU, or nproc_cpu without
  train.steps=100    any key of the recipe (`zoo show --schema`), also as --train.steps=100 or --train.steps 100
  run.dir=FOLDER     the run folder; a run that was stopped resumes from there

Exit codes: 0 done, 2 a mistake that you can fix, 130 Ctrl-C, 75 SIGTERM, SIGUSR1, SIGHUP or SIGQUIT (start the same command
again), 76 left because a rank died or hangs.

A step's line has the loss (mean over its labels, in nats), the learning rate, real tokens a second (without padding), the share of
computed tokens that is padding, the share of time spent waiting for data, and the time to go. An evaluation's has the loss and the share of
answers that are exactly right, by kind of row.

Under torchrun (`torchrun --nproc-per-node 8 -m zoo train ...`) and under SLURM (`srun zoo train ...`) each process is a
rank. A template trains nothing: it writes a file for these arguments, to be submitted to SLURM (sbatch), Kubernetes (a TrainJob of
Kubeflow Trainer, or a plain JobSet) or SkyPilot, which start the command again after exit codes 75, 76 and 137.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_recipe

if TYPE_CHECKING:
    from zoo.config.schema import Recipe

_FIRST_LINE = 119  # characters


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say; 0 when the run came to its end, 130 when it was interrupted, 75 when it was preempted."""
    from zoo.logging.terminal import live_terminal
    from zoo.parallel.signals import interrupts

    with interrupts(), live_terminal():  # from the first second on
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    from zoo.launch.templates import TEMPLATES

    flags, rest = split_flags(arguments, tuple(TEMPLATES))
    name, overrides = split_recipe(rest, "zoo train recipe=NAME")

    from zoo.config.compose import resolve
    from zoo.launch.launcher import launch
    from zoo.logging.startup_time import note_command
    from zoo.logging.terminal import set_status

    note_command()
    resolved = resolve(name, overrides)
    if flags:
        for flag in sorted(flags):
            _write_template(flag, resolved.recipe, rest)
        return 0
    set_status("planning" if resolved.recipe.parallel.plan else "checking the recipe and its data")

    def announce(recipe: Recipe, ranks: int) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        print(_first_line(recipe), flush=True)
        print(_headline(recipe, resolved.size_why, ranks), flush=True)
        if resolved.taken:
            print(f"zoo: {resolved.taken}", flush=True)
        if resolved.recipe.parallel.plan:
            chosen = _planned(resolved.recipe, recipe)
            print(f"zoo: planned for {recipe.hardware or 'these ranks'}: {chosen}", flush=True)

    result = launch(resolved.recipe, in_process=True, announce=announce)
    if result.code == 0 and os.environ.get("RANK", "0") == "0":
        print("\n".join(["", "Next:", *_next(resolved.recipe, Path(result.run_dir))]), flush=True)
    return result.code


def _write_template(flag: str, recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write a batch file, after the checks that a run would make; hardware= says of how many nodes and GPUs."""
    from zoo.config.validate import validate
    from zoo.launch.templates import TEMPLATES, Job
    from zoo.planner.plan import planned_ranks
    from zoo.planner.plan_process import planned

    ranks = planned_ranks(recipe)
    job = Job.from_recipe(validate(planned(recipe, ranks), ranks), arguments, ranks)
    write, submit = TEMPLATES[flag]
    path = write(job)
    print(f"wrote {path}: {job.nodes} x {job.ranks_of_node} ranks; {submit} {path}")


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


def _first_line(recipe: Recipe) -> str:
    """What is trained on which rows, in under 120 characters, and where a run's numbers are explained."""
    from zoo.config.entries import parse_entry

    entries = [parse_entry(spec, "data.train") for spec in recipe.data.train]
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    model = " ".join(filter(None, (_short(recipe.model.family, 16), _short(recipe.size or "", 20))))
    init = "random" if recipe.model.init == "random" else _short(Path(recipe.model.init).name, 30)
    before, after = f"zoo: {model}, {init} weights | trains on ", f"{more} | numbers: zoo train --help"
    rows = Path(entries[0].selected).name if entries else "no rows"
    return f"{before}{_short(rows, _FIRST_LINE - len(before) - len(after))}{after}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _headline(recipe: Recipe, size_why: str, ranks: int) -> str:
    """The second line of a run: its recipe, what it is evaluated on, and where to."""
    from zoo.config.derived import data_parallel

    sizes = {name: getattr(recipe.parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    shown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    shown.append(f"dp={data_parallel(recipe, ranks)}")
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"zoo: recipe {recipe.recipe} | size {recipe.size or '-'} ({size_why}) | weights {recipe.model.init} | "
        f"{_evaluation(recipe)} | {count} ({' '.join(shown)}) | {recipe.run.dir}"
    )


def _next(recipe: Recipe, folder: Path) -> list[str]:
    """What to look at and to run after a run that is done, a line each."""
    from zoo.config.compose import about
    from zoo.config.recipes.matrix import recipe_names

    zoo = "zoo"
    if not shutil.which("zoo"):
        zoo = sys.argv[0] if Path(sys.argv[0]).name == "zoo" else "python -m zoo"
    plots = folder / "plots"
    base = about(recipe.recipe)["base"] if recipe.recipe in recipe_names() else None
    steps = [
        (f"open {plots / 'predictions.png'}", "first: what it answers to rows it has not seen"),
        (f"open {plots / 'loss.png'}", "the loss, and what was learnt"),
        (f"{zoo} eval {folder}", "its answers to those rows, scored by kind"),
        (f"{zoo} report {folder}", "the run as a page"),
        (f"{zoo} train recipe={base}", "the recipe that this one stands on"),
        (f"{zoo} show {folder / 'config.yaml'}", "every key of the recipe"),
    ]
    answered = (plots / "predictions.png").is_file()
    left_out = {0: answered, 1: (plots / "loss.png").is_file(), 2: answered, 4: base is not None}
    shown = [step for number, step in enumerate(steps) if left_out.get(number, True)]
    width = max(len(command) for command, _ in shown)
    return [f"  {command:<{width}}  {why}" for command, why in shown]


def _evaluation(recipe: Recipe) -> str:
    """On what a run evaluates, or why on nothing."""
    from zoo.data.loading.defaults import evaluated_on

    names = evaluated_on(recipe.data)
    if names and recipe.train.eval_rows != 0:
        return f"evaluates on {', '.join(names)}"
    if names:
        return "no evaluation (train.eval_rows=0)"
    if recipe.data.eval:
        return "no evaluation (data.eval=FILE gives one, and so does held_out: 0.05 in an entry of data.train)"
    return "no evaluation (data.eval=none)"
