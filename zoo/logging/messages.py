"""Messages of a run to the person watching, at its start and at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from zoo.config.derived import data_parallel, micro_batches, random_base
from zoo.config.entries import parse_entry
from zoo.config.resume import HELD, Change
from zoo.config.schema import Recipe, TrainConfig
from zoo.data.loading.defaults import with_defaults
from zoo.types import JsonObject

WITHOUT_MOMENTS = "that checkpoint holds weights alone (train.save=weights): the optimizer's moments begin at zero"


def at_start(
    recipe: Recipe,
    *,
    parameters: int,
    with_adapters: tuple[int, int],
    kept_frozen: Sequence[str],
    updated: tuple[int, int],
    steps: str,
    rows: int | None,
    eval_rows: int | None,
) -> str:
    """The model's size, its data and the number of steps.

    Args:
        parameters: those of this rank, adapters included.
        with_adapters: the adapters' parameters among them, and those that are trained whole next to adapters.
        kept_frozen: weights of `lora.whole_parts` that PEFT can't save apart.
        updated: of the trained ones, those that train.optimizer=muon gives to Muon, and all.
        steps: the number of steps, as `steps_of` has it.
        rows: of data.train; None for a stream.
        eval_rows: of data.eval; None where nothing is evaluated.
    """
    adapters, whole = with_adapters
    share = f", {adapters / 1e6:.2f} M in adapters" if adapters else ""
    share += f" and {whole / 1e6:.2f} M trained whole" if whole else ""
    if adapters and recipe.train.preference and not recipe.lora.keep_dropout:
        share += " without dropout (lora.keep_dropout=true keeps it)"
    elif adapters and recipe.train.embeds:
        share += " without dropout"
    by_muon, trained = updated
    if recipe.train.optimizer == "muon":
        share += f", {by_muon / 1e6:.2f} M of them updated by Muon and {(trained - by_muon) / 1e6:.2f} M by AdamW"
    trains = "a stream" if rows is None else f"{rows} rows"
    evaluates = "no evaluation"
    if eval_rows is not None:
        evaluates = f"evaluates on {eval_rows} of {_names(with_defaults(recipe.data).eval)}"
    below = f" | {warning}" if (warning := random_base(recipe)) else ""
    if kept_frozen:
        why = "PEFT saves whole modules, and the one that has it holds other parts too"
        below += f" | {', '.join(kept_frozen)} of lora.whole_parts stays as it is: {why}"
    size = f"{parameters / 1e6:.2f} M parameters on this rank{share}"
    return f"{size} | trains on {trains} of {_names(recipe.data.train)}, {evaluates} | {steps}{below}"


class StepSource(Protocol):
    """What a run's loader knows of its steps; `zoo.data.loading.loader.BatchLoader` is one."""

    bins_per_step: int
    short_step: int | None

    @property
    def total_steps(self) -> int | None: ...
    @property
    def exact(self) -> bool: ...


def at_batch(recipe: Recipe, ranks: int, before: int | None) -> Iterator[str]:
    """How so many ranks make up train.global_batch, where it is to be said.

    Args:
        before: ranks that wrote the checkpoint that is resumed; None for a fresh start.
    """
    each, fillers = micro_batches(recipe, ranks)
    replicas = data_parallel(recipe, ranks)
    if recipe.rl.algorithm or (not fillers and before in (None, ranks)):
        return
    moved = "" if before in (None, ranks) else f"{before} ranks became {ranks}, and the batch stays: "
    wasted = f", of which {fillers} of {each * replicas} only fill the step up and count nothing" if fillers else ""
    times = "micro-batch" if each == 1 else "micro-batches"
    yield f"{moved}train.global_batch={recipe.train.global_batch} is {each} {times} on each of {replicas} replicas{wasted}"


def steps_of(train: TrainConfig, total_steps: int, loader: StepSource) -> str:
    """The number of steps of a run, and what its loader knows of it."""
    text = f"{total_steps} steps"
    if loader.total_steps is not None and not loader.exact:
        text = f"about {text} (train.epochs={train.epochs or 1.0:g}, estimated from the lengths of some rows; the run corrects it)"
    elif loader.short_step is not None:
        text += f", the last of {loader.short_step} micro-batches in the place of {loader.bins_per_step}"
    if train.warmup_steps > total_steps:
        text += f", all within the warm-up of {train.warmup_steps}"
    return text


def at_change(changes: Sequence[Change]) -> Iterator[str]:
    """What a resumed run does otherwise than the recipe of its checkpoint."""
    for change in changes:
        if change.key not in HELD:
            yield f"the recipe differs from the checkpoint's, as allowed: {change}"
    if held := [str(change) for change in changes if change.key in HELD]:
        yield f"the optimizer's state is converted to what this recipe holds: {'; '.join(held)}"


def at_shrinking(rows: int, budget: int) -> str:
    """That data.overlong=shrink has made the media of some rows smaller, said once."""
    return (
        f"data.overlong=shrink: images or videos of {rows} of the rows read so far are made smaller to fit packing.budget "
        f'{budget}; train.jsonl counts such rows ("rows_shrunk")'
    )


def at_step_without_labels(step: int, why: str) -> str:
    """That a step is not applied as it has nothing to learn, said once."""
    return f'step {step} is not applied: {why}; summary.json counts such steps (skipped_steps, "labels")'


def at_new_level(step: int, level: float, train: TrainConfig) -> str:
    """That spikes in a row are the loss's new level."""
    return (
        f"{train.skip_limit} spikes in a row up to step {step}: their median, {level:.4g}, is the level of the loss from here on "
        "(train.on_new_level=take)"
    )


def at_end(summary: JsonObject, losses: Sequence[float], folder: Path, bad_steps: Path) -> Iterator[str]:
    """Rows and steps left out, the course of the loss, and how to resume an interrupted run.

    Args:
        summary: the content of summary.json.
        losses: of all steps.
        folder: the run folder.
        bad_steps: the folder of bad steps.
    """
    if summary["skipped_rows"]:
        rows = ", ".join(f"{count} {cause}" for cause, count in summary["skipped_rows"].items())
        yield f"rows left out: {rows}; {folder / 'bad_rows.jsonl'} lists them"
    if summary.get("shrunk_rows"):
        yield f"rows whose images or videos were made smaller (data.overlong=shrink): {summary['shrunk_rows']}"
    if summary["skipped_steps"]:
        steps = ", ".join(f"{count} ({cause})" for cause, count in summary["skipped_steps"].items())
        listed = set(summary["skipped_steps"]) - {"labels"}
        yield f"steps not applied: {steps}" + (f"; {bad_steps} has the rows of bad ones" if listed else "")
    done, total = summary["steps"], summary["total_steps"]
    if summary["interrupted"]:
        remaining = "train on" if done < total else "evaluate and export"
        saved = f"stopped at step {done} of {total}, saved in {summary['checkpoint']}"
        yield f"{saved}; run the same command again to {remaining}"
    elif losses:
        if summary.get("stopped"):
            yield f"stopped at step {done} of {total}: {summary['stopped']}"
        plots = folder / "plots"
        if (plots / "predictions.png").is_file():
            yield f"what the model answers to held-out rows: {plots / 'predictions.png'}"
        known = [loss for loss in losses if math.isfinite(loss)] or [math.nan]  # a step without labels has none
        if "reward" in summary["metrics"]:
            yield f"reward of held-out rows {summary['metrics']['reward']:.4f} after {done} steps; plot: {plots / 'loss.png'}"
            return
        yield f"loss {known[0]:.4f} -> {known[-1]:.4f} in {done} steps; plot: {plots / 'loss.png'}"


def reason(interrupted: bool, preempted: bool, finished: bool, stopped: bool) -> str:
    """Why a run ends, in a word or three."""
    if interrupted:
        return "preempted" if preempted else "interrupted"
    return "finished" if finished else "stopped" if stopped else "out of time"


def at_finished(folder: Path, done: int, total: int, early: str | None, train: TrainConfig) -> str:
    """That a run is finished, and how it would train on.

    Args:
        folder: the run folder.
        done: its steps.
        total: steps of the recipe.
        early: why it ended before its last step.
        train: its length, in steps or epochs.
    """
    if early is not None and done < total:
        return (
            f"{folder} is finished at step {done} of {total}: {early}. Raise train.early_stop_patience or set "
            "train.early_stop=null to train on, or give another run.dir to start over."
        )
    key = "train.steps" if train.steps is not None else "train.epochs"
    asked = f"{total}" if train.steps is not None else f"no more ({train.epochs or 1.0:g})"
    return (
        f"{folder} is finished: {done} steps are done and {key} asks for {asked}. "
        f"Give more {key} to train on, or another run.dir to start over."
    )


def at_last_copy(folder: Path, staged: Path) -> str:
    """That a run waits for its last checkpoint, which is whole in run.stage, to be copied to the run folder."""
    return (
        f"the last checkpoint is whole in {staged} and is being copied to {folder}; Ctrl-C twice leaves at once, and the same "
        "command on this machine finishes the copy"
    )


def late_save(seconds: float, recipe: Recipe, about: str = "") -> str | None:
    """A warning where a save takes `seconds`, which is longer than run.save_within allows after a signal; else None.

    `about` stands before the seconds of an estimate.
    """
    allowed = recipe.run.save_within
    if seconds <= allowed:
        return None
    return (
        f"WARNING: a save takes {about}{seconds:.0f} s. A run that a signal stops leaves after {allowed:.0f} s (run.save_within) "
        f"without one, and loses the steps since the last save. Set run.save_within={2 * seconds:.0f} if the scheduler "
        f"waits that long, else save more often (train.save_every)"
    )


def _names(specs: Sequence[object]) -> str:
    return ", ".join(Path(str(parse_entry(spec, ""))).name for spec in specs)
