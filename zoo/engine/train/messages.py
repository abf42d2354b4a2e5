"""Messages of a run to the person watching, at its start and at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.config.entries import parse_entry
from zoo.config.schema import Recipe
from zoo.data.loading.defaults import with_defaults
from zoo.engine.train import bad_step_records
from zoo.engine.train.dataloader import RunData


def at_start(recipe: Recipe, data: RunData, parameters: int, adapters: int, total_steps: int) -> str:
    """The model's size, its data and the number of steps; `parameters` of this rank, adapters included."""
    share = f", {adapters / 1e6:.2f} M in adapters" if adapters else ""
    rows = "a stream" if data.source.rows.has_stream else f"{len(data.source)} rows"
    warm_up = recipe.train.warmup_steps
    within = f", all within the warm-up of {warm_up}" if warm_up > total_steps else ""
    return (
        f"{parameters / 1e6:.2f} M parameters on this rank{share} | trains on {rows} of {', '.join(_names(recipe.data.train))}, "
        f"{_evaluates(recipe, data)} | {total_steps} steps{within}"
    )


def at_end(summary: dict[str, Any], losses: Sequence[float], folder: Path) -> Iterator[str]:
    """Rows and steps left out, the course of the loss, and how to resume an interrupted run; `summary`: summary.json."""
    if summary["skipped_rows"]:
        rows = ", ".join(f"{count} {cause}" for cause, count in summary["skipped_rows"].items())
        yield f"rows left out: {rows}; {folder / 'bad_rows.jsonl'} lists them"
    if summary["skipped_steps"]:
        steps = ", ".join(f"{count} ({cause})" for cause, count in summary["skipped_steps"].items())
        yield f"steps not applied: {steps}; {folder / bad_step_records.FOLDER} has their rows"
    done, total = summary["steps"], summary["total_steps"]
    if summary["interrupted"]:
        what = "train on" if done < total else "evaluate and export"
        yield (
            f"stopped at step {done} of {total}, saved in {summary['checkpoint']}; run the same command again to {what}"
        )
    elif losses:
        plot = folder / "plots" / "loss.png"
        yield f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {done} steps; plot: {plot}"


def _evaluates(recipe: Recipe, data: RunData) -> str:
    if data.held_out is None:
        return "no evaluation"
    return f"evaluates on {len(data.held_out)} of {', '.join(_names(with_defaults(recipe.data).eval))}"


def _names(specs: Sequence[Any]) -> list[str]:
    return [Path(str(parse_entry(spec, ""))).name for spec in specs]
