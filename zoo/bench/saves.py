"""`zoo bench saves`: what a run's saves cost its steps, from its `train.jsonl`."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from zoo.errors import UserError
from zoo.logging.result import records
from zoo.types import JsonObject


@dataclass(frozen=True)
class SaveBenchOptions:
    """Whose saves."""

    run: str = "runs/demo"


@dataclass(frozen=True)
class SaveCosts:
    """Times in milliseconds, medians but for the shares. `beside`: steps during which a save was written."""

    saves: int
    save_every: int  # steps from one save to the next
    step_ms: float  # of steps that nothing was written beside
    beside_ms: float
    steps_beside: int
    stall_ms: float  # that training waits for a save
    write_ms: float  # from then until it is published
    share_of_step: float  # stall_ms / step_ms
    share_of_run: float  # of all time: stalls, and what steps beside a save took longer than the others
    copy_ms: float | None = None  # that a copy from run.stage to run.dir took; None without one


def run(options: SaveBenchOptions) -> SaveCosts:
    """Raises UserError where the run has too few steps or saves to compare."""
    folder = Path(options.run)
    if not (folder / "train.jsonl").is_file():
        raise UserError(f"run={folder}: no train.jsonl there; give the folder of a run")
    return report(list(records(folder)))


def report(lines: list[JsonObject]) -> SaveCosts:
    """Costs of the saves of a run, from the lines of its log in order."""
    steps = {line["step"]: line["step_ms"] for line in lines if "event" not in line}
    steps.pop(min(steps, default=0), None)  # the first one warms up
    last, saves, copies, save_steps = 0, [], [], set()
    for line in lines:
        if "event" not in line:
            last = line["step"]
        elif "stall_ms" in line or "copy_ms" in line:
            copies += [line["copy_ms"]] if "copy_ms" in line else []
            if last <= line["step"]:
                continue
            saves += [line] if line["event"] == "save" else []
            save_steps |= {step for step in range(line["step"] + 1, last + 1) if step in steps}
    away = [ms for step, ms in steps.items() if step not in save_steps]
    if len(saves) < 2 or not away or not save_steps:
        raise UserError(
            "too little to tell: wanted two saves with steps behind them, and steps that no save was written beside; "
            "run longer, or with a larger train.save_every"
        )
    plain = statistics.median(away)
    stalls = [save["stall_ms"] for save in saves]
    slower = sum(steps[step] - plain for step in save_steps)
    return SaveCosts(
        saves=len(saves),
        save_every=int(statistics.median(later["step"] - save["step"] for save, later in pairwise(saves))),
        step_ms=plain,
        beside_ms=statistics.median(steps[step] for step in save_steps),
        steps_beside=len(save_steps),
        stall_ms=statistics.median(stalls),
        write_ms=statistics.median(save["write_ms"] for save in saves),
        share_of_step=statistics.median(stalls) / plain,
        share_of_run=(sum(stalls) + slower) / (sum(steps.values()) + sum(stalls)),
        copy_ms=statistics.median(copies) if copies else None,
    )


def table(report: SaveCosts) -> str:
    """The report in a few lines."""
    rows = {
        f"a step, of {report.steps_beside} with a save beside it": f"{report.beside_ms:,.1f} ms",
        "a step, of the others": f"{report.step_ms:,.1f} ms",
        f"a save stalls training ({report.saves} saves)": f"{report.stall_ms:,.1f} ms, {report.share_of_step:.1%} of a step",
        "and is published after": f"{report.write_ms:,.1f} ms",
        f"all of it, at a save every {report.save_every} steps": f"{report.share_of_run:.1%} of the run's time",
    }
    if report.copy_ms is not None:
        rows["and is copied to run.dir in"] = f"{report.copy_ms:,.1f} ms"
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def as_json(report: SaveCosts) -> str:
    """For machines."""
    return json.dumps(asdict(report), indent=2)
