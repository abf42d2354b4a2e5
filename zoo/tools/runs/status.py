"""The state of a run, read from its folder while it runs and afterwards: `zoo show RUN`. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from zoo.checkpoint.progress import saving
from zoo.config.compose import is_saved_recipe
from zoo.config.locate import checkpoints, step_of
from zoo.errors import UserError, printable
from zoo.files import file_clock
from zoo.logging.progress_line import clock
from zoo.logging.result import read_summary, records
from zoo.types import JsonObject
from zoo.watchdog.health import read_health
from zoo.watchdog.run_lock import held_since

RECENT = 50  # steps that speed and mean loss are taken over, at most
_STALLED = 60.0  # seconds without progress of any rank that are worth a word, long before run.hang_timeout
_LATE = 3  # a rank is silent after so many missing heartbeats


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state; a field is None where it can't be known yet."""

    run_dir: str
    # starting | running | stalled | gone | finished | out of time | stopped | interrupted | preempted | failed
    state: str
    why: str | None = None  # it ended so
    step: int = 0
    total_steps: int | None = None
    steps_per_second: float | None = None
    tokens_per_second: float | None = None  # real ones, of all ranks
    eta_seconds: float | None = None  # of a run that runs
    loss: float | None = None  # of the last step
    mean_loss: float | None = None  # over the last `mean_loss_steps` steps
    mean_loss_steps: int = 0  # RECENT, or those that there are; a start's first step is left out then
    last_step_age: float | None = None  # seconds since the last step ended
    save_step: int | None = None  # of the newest checkpoint
    save_age: float | None = None  # seconds
    checkpoint: str | None = None
    saving: str | None = None  # how far the save is that is being written
    eval: JsonObject | None = None  # step, loss, exact_match of the last one
    starts: int = 0  # how often it was started and resumed
    skipped_steps: int = 0
    slow_steps: dict[str, int] = field(default_factory=dict)  # by cause
    bad_rows: dict[str, int] = field(default_factory=dict)  # left out, by cause
    ranks: list[JsonObject] = field(default_factory=list)  # as in health.json, of a run that runs
    health_age: float | None = None  # seconds since health.json was written

    def to_json(self) -> JsonObject:
        """The status as plain values."""
        return asdict(self)


def is_run(path: str | Path) -> bool:
    """Whether a path looks like the folder of a run."""
    folder = Path(path)
    config = folder / "config.yaml"
    return (folder / "train.jsonl").is_file() or (config.is_file() and is_saved_recipe(config))


def read_status(path: str | Path) -> RunStatus:
    """The state of the run in a folder.

    Raises:
        UserError: the folder does not exist, or holds no run.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; wanted a run folder, as run.dir names it")
    if not is_run(folder):
        raise UserError(f"{folder} is no run folder: it holds no train.jsonl; wanted one that run.dir names")
    events, recent, logged = _read(folder)
    last = recent[-1] if recent else {}
    # The first step after a start is not typical: kernels are built, caches are filled.
    recent = recent[1:] if 1 < len(recent) < RECENT else recent
    losses = [r["loss"] for r in recent if r["loss"] is not None]  # of a bad step there may be none
    tokens = [r["real_tokens"] for r in recent if "real_tokens" in r]
    health, log, log_time = read_health(folder), folder / "train.jsonl", 0.0
    with contextlib.suppress(OSError):
        log_time = log.stat().st_mtime  # by the file system's clock
    # By the clock of the file system, which only a run's own machine knows where the folder can't be written to.
    now = file_clock(folder) if health is None else health["written"] + health["age"]
    state, why = _state(events, last, health, held_since(folder), log_time)
    live = state in ("running", "stalled", "starting")
    seconds = _seconds_a_step(recent)
    totals = [r["total_steps"] for r in events if "total_steps" in r]
    total, step = totals[-1] if totals else _summary(folder).get("total_steps"), last.get("step", 0)
    saved, written = _newest(folder)
    under_way = saving(folder)
    evals = [r for r in events if r["event"] == "eval"]
    return RunStatus(
        run_dir=str(folder),
        state=state,
        why=why,
        step=step,
        total_steps=total,
        steps_per_second=1 / seconds if seconds else None,
        tokens_per_second=statistics.mean(tokens) / seconds if seconds and tokens else None,
        eta_seconds=(total - step) * seconds if live and seconds and total is not None else None,
        loss=last.get("loss"),
        mean_loss=statistics.mean(losses) if losses else None,
        mean_loss_steps=len(losses),
        last_step_age=_age(last, logged, max(0.0, now - log_time)),
        save_step=step_of(saved) if saved else None,
        save_age=max(0.0, now - written) if saved else None,
        checkpoint=str(saved) if saved else None,
        saving=f"step {under_way.step}, {under_way}" if live and under_way else None,
        eval={k: evals[-1].get(k) for k in ("step", "loss", "exact_match", "rows")} if evals else None,
        starts=sum(r["event"] in ("start", "resume") for r in events),
        skipped_steps=sum(r["event"] == "skip" for r in events),
        slow_steps=dict(Counter(r.get("cause", "?") for r in events if r["event"] == "slow_step")),
        bad_rows=next((r.get("counts", {}) for r in events[::-1] if r["event"] == "rows_left_out"), {}),
        ranks=health["ranks"] if health and (live or state in ("failed", "gone")) else [],
        health_age=health["age"] if health else None,
    )


def _read(folder: Path) -> tuple[list[JsonObject], list[JsonObject], float | None]:
    """Events, the last steps in order, of which there may be a million in train.jsonl, and the time of the last line."""
    events: list[JsonObject] = []
    last: dict[int, JsonObject] = {}
    logged: float | None = None
    for record in records(folder):
        logged = record.get("time", logged)
        if "event" in record:
            events.append(record)
        else:
            last.pop(record["step"], None)  # a step that was repeated comes last
            last[record["step"]] = record
            if len(last) > RECENT:
                del last[next(iter(last))]
    return events, [last[step] for step in sorted(last)], logged


def _summary(folder: Path) -> JsonObject:
    """summary.json; nothing where it is not there or somebody has changed it."""
    try:
        return read_summary(folder) or {}
    except UserError:
        return {}


def _newest(folder: Path) -> tuple[Path | None, float]:
    """The newest checkpoint and when it was written; one that the run removes just now is passed over."""
    for checkpoint in reversed(checkpoints(folder)):
        with contextlib.suppress(OSError):
            return checkpoint, checkpoint.stat().st_mtime
    return None, 0.0


def _state(
    events: list[JsonObject], last: JsonObject, health: JsonObject | None, held: float | None, logged: float
) -> tuple[str, str | None]:
    """What the run is doing or how it ended, and why.

    `held`: since when a living run has the folder, `logged`: when a line was last logged, both by the file system's clock.
    """
    turns = [r for r in events if r["event"] in ("start", "resume", "end")]
    ended = turns[-1] if turns and turns[-1]["event"] == "end" else None
    if health is not None and health["alive"] and (ended is None or health["written"] > logged + 5):
        if ended is not None or not turns:
            return "starting", None
        stuck = min((rank["stuck_seconds"] for rank in health["ranks"]), default=0.0) + health["age"]
        return ("stalled", f"no rank has got on for {stuck:.0f} s") if stuck > _STALLED else ("running", None)
    # Its health is written only once it has a log, and a moment later.
    if held is not None and (not turns or logged < held):
        return "starting", None
    if held is not None and ended is None:
        return "running", None
    if ended is not None:
        reason = ended.get("reason", "finished")
        known = ("finished", "out of time", "stopped", "interrupted", "preempted")
        return (reason, ended.get("why")) if reason in known else ("failed", ended.get("message") or reason)
    if not events and not last:
        return "gone", "it has not come to its first step, and no process of it is there"
    return "gone", "it has not recorded how it ended, and no process of it is there"


def _seconds_a_step(recent: list[JsonObject]) -> float | None:
    """From one step's end to the next, the median: a save or an evaluation between two of them is not typical."""
    times = [r["time"] for r in recent if "time" in r]
    gaps = [b - a for a, b in pairwise(times) if b >= a]
    if gaps:
        return statistics.median(gaps) or None
    durations = [r["step_ms"] for r in recent if "step_ms" in r]
    return statistics.median(durations) / 1e3 or None if durations else None


def _age(step: JsonObject, logged: float | None, log_age: float) -> float | None:
    """Seconds since a step was logged: the age of the log, and how long the step was before its last line.

    A step before a resume on another machine may have a later time than that line.
    """
    if "time" not in step or logged is None:
        return None
    return log_age + max(0.0, logged - step["time"])


def describe(status: RunStatus) -> str:
    """The status as a few lines of text."""
    total = "?" if status.total_steps is None else f"{status.total_steps}"
    age = "" if status.last_step_age is None else f"{clock(status.last_step_age)} ago"
    loss = evaluated = ""
    if status.loss is not None and status.mean_loss is not None:
        loss = f"{status.loss:.4f}, {status.mean_loss:.4f} on average over the last {status.mean_loss_steps} steps"
    if status.eval is not None:
        scores = "" if status.eval["loss"] is None else f"loss {status.eval['loss']:.4f}, "
        match = status.eval.get("exact_match")  # a reward model has none
        scores += "" if match is None else f"exact match {match:.1%} "
        evaluated = f"{scores}at step {status.eval['step']}"
    saved = "none yet"
    if status.save_step is not None and status.save_age is not None:
        saved = f"step {status.save_step}, {clock(status.save_age)} ago, {status.checkpoint}"
    left = "" if status.eta_seconds is None else f"{clock(status.eta_seconds)} to go"
    speed = ""
    if status.steps_per_second is not None and status.tokens_per_second is not None:
        speed = f"{status.steps_per_second:.3g} steps/s, {status.tokens_per_second:,.0f} real tokens/s"
    lines = [
        ("run", status.run_dir),
        ("state", status.state + (f": {status.why}" if status.why else "")),
        ("step", ", ".join(part for part in (f"{status.step} of {total}", age, left) if part)),
        ("speed", speed),
        ("loss", loss),
        ("eval", evaluated),
        ("last save", saved),
        ("saving", (status.saving or "").replace("saving ", "")),
        ("health", _health(status)),
        *(("", line) for line in _trouble(status)),
    ]
    return "\n".join(f"{name:<10} {printable(text)}".rstrip() for name, text in lines if text)


def _health(status: RunStatus) -> str:
    slow = ", ".join(f"{count} by {cause}" for cause, count in status.slow_steps.items())
    left_out = ", ".join(f"{count} {cause}" for cause, count in status.bad_rows.items())
    ranks = f"{sum(not _silent(rank, status) for rank in status.ranks)} of {len(status.ranks)} ranks alive"
    if status.state in ("gone", "failed"):
        ranks = f"{len(status.ranks)} ranks when it was last seen"
    counts = {
        ranks: status.ranks,
        f"{status.skipped_steps} steps skipped": status.skipped_steps,
        f"slow steps: {slow}": slow,
        f"rows left out: {left_out}": left_out,
        f"started {status.starts} times": status.starts > 1,
    }
    return ", ".join(text for text, shown in counts.items() if shown)


def _silent(rank: JsonObject, status: RunStatus) -> bool:
    return rank["silent_seconds"] > max(10.0, _LATE * len(status.ranks) / 64)


def _trouble(status: RunStatus) -> list[str]:
    """Where ranks stand, where it matters."""
    if status.state == "running":
        ranks = [rank for rank in status.ranks if _silent(rank, status)]
    else:
        ranks = status.ranks if status.state in ("stalled", "gone", "failed") else []
    lines = []
    for rank in ranks[:16]:
        call = f" in {rank['waits_in']}" if rank["waits_in"] else ""
        location = f" at {rank['place']}" if rank["place"] else ""
        silent = f", silent for {rank['silent_seconds']:.0f} s" if _silent(rank, status) else ""
        lines.append(
            f"rank {rank['rank']}: after step {rank['step']}, {rank['phase']}{call}{location} "
            f"for {rank['phase_seconds']:.0f} s{silent}"
        )
    return lines + ([f"and {len(ranks) - 16} ranks more"] if len(ranks) > 16 else [])


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
    fewer = "" if run.mean_loss_steps == RECENT else f" ({run.mean_loss_steps})"
    return (
        printable(run.run_dir),
        printable(run.state),
        f"{run.step:,} of {'?' if run.total_steps is None else f'{run.total_steps:,}'}",
        "" if run.mean_loss is None else f"{run.mean_loss:.4f}{fewer}",
        "" if loss is None else f"{loss:.4f}",
        "" if match is None else f"{match:.1%}",
        "" if run.last_step_age is None else f"{clock(run.last_step_age)} ago",
        "" if run.eta_seconds is None else clock(run.eta_seconds),
    )
