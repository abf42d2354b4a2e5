"""`zoo list runs`: the run folders beneath a folder, with state and score. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zoo.errors import UserError, printable
from zoo.logging.progress_line import clock
from zoo.tools.runs.status import RECENT, RunStatus, is_run, read_status

_DEPTH = 4  # folders within folders
_LOSS = f"loss, mean of {RECENT} steps"  # of fewer, their number stands beside it
_COLUMNS = ("run", "state", "step", _LOSS, "held-out loss", "exact match", "last step", "to go")


def find_runs(folder: str | Path = "runs") -> list[RunStatus]:
    """The status of each run beneath a folder, or of the folder itself, by path.

    Raises:
        UserError: there is no such folder.
    """
    top = Path(folder)
    if not top.is_dir():
        raise UserError(f"{top}: no such folder; wanted one that holds run folders, such as the one of run.dir")
    return [read_status(path) for path in _run_folders(top, _DEPTH)]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        inner = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        for entry in sorted(inner, key=lambda entry: entry.name):
            yield from _run_folders(Path(entry.path), depth - 1)


def table(runs: list[RunStatus]) -> str:
    """A line for each run."""
    rows = [_COLUMNS, *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(run: RunStatus) -> tuple[str, ...]:
    scores = run.eval or {}
    loss, match = scores.get("loss"), scores.get("exact_match")
    return (
        printable(run.run_dir),
        printable(run.state),
        f"{run.step:,} of {'?' if run.total_steps is None else f'{run.total_steps:,}'}",
        "" if run.mean_loss is None else f"{run.mean_loss:.4f}{_of_fewer(run)}",
        "" if loss is None else f"{loss:.4f}",
        "" if match is None else f"{match:.1%}",
        "" if run.last_step_age is None else f"{clock(run.last_step_age)} ago",
        "" if run.eta_seconds is None else clock(run.eta_seconds),
    )


def _of_fewer(run: RunStatus) -> str:
    return "" if run.mean_loss_steps == RECENT else f" ({run.mean_loss_steps})"
