"""A long run of small steps with evaluations and saves, watched from outside for what grows.

    python -m benchmarks.soak steps=300 after=100 every=50 folder=runs/soak

  recipe=qwen3_vl_sft size=tiny nproc=1  what is trained; further keys of the recipe (with a dot) can be given
  steps=10000 every=500 after=1000       steps, between two evaluations or saves, and before growth is counted
  folder=soak                            where the run, soak.json and soak.png (a plot) go

The run is `zoo train` in a process of its own. Four times a second the memory, open files and processor time of that process
and of all that it has started are read from /proc, with the step that train.jsonl has come to; nothing in the run knows
of it. What counts is the growth between two windows, each a tenth of the steps after `after`: the first and the last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import script
from zoo.bench.options import Bounded
from zoo.config.layers.keys import number
from zoo.errors import UserError
from zoo.files import replaced, write_atomically
from zoo.logging.result import records
from zoo.records import line_of_json
from zoo.subprocesses import module_command
from zoo.types import JsonObject

PERIOD = 0.25  # seconds between two looks
SHORT_ROWS = {  # a step takes little, and whatever a step leaves behind shows all the same
    "packing.budget": "256",
    "train.warmup_steps": "10",
    "train.log_every": "1000",
    "train.eval_rows": "16",
    "data.augment": "0",
    "data.cache_mb": "16",
    "engine.threads": "1",
    "export": "false",
}


@dataclass(frozen=True)
class SoakOptions(Bounded):
    """What is run."""

    recipe: str = "qwen3_vl_sft"
    size: str = "tiny"
    nproc: int = number(1, 1, 4096)
    steps: int = number(10_000, 100, 10**9)
    every: int = number(500, 1, 10**9)  # steps between evaluations, and between saves
    after: int = number(1000, 1, 10**9)  # steps that are not counted: caches fill, allocators settle
    folder: str = "soak"  # where the run, soak.json and soak.png go


@dataclass(frozen=True)
class Mark:
    """What was seen at one moment, of all processes together."""

    step: int
    seconds: float
    memory: float  # MiB resident
    files: int  # open ones
    cpu: float  # seconds of processor time


@dataclass(frozen=True)
class Growth:
    """Medians of the first and the last window."""

    first: float
    last: float

    @property
    def share(self) -> float:
        """How much more the last is, as a share of the first."""
        return self.last / self.first - 1 if self.first else 0.0


@dataclass(frozen=True)
class SoakReport:
    """What the soak shows."""

    options: SoakOptions
    seconds: float
    events: dict[str, int]  # of the run, by name
    marks: list[Mark]
    steps_ms: list[float]  # of each step, without evaluations and saves
    memory: Growth  # MiB
    files: Growth
    step_ms: Growth  # as the clock goes: what else the machine does shows, too
    cpu_ms: Growth  # of a step, with its share of evaluations and saves


def run(options: SoakOptions, overrides: Sequence[str] = ()) -> SoakReport:
    """Train, watch, and write `soak.json` and `soak.png`.

    Raises:
        UserError: the steps are too few to see growth, or the run has failed.
    """
    if options.steps < 2 * options.after:
        raise UserError(f"steps={options.steps}: wanted at least twice after={options.after}")
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    marks = _watch(_command(options, overrides), folder)
    report = _report(options, marks, list(records(folder / "run")), time.monotonic() - began)
    write_atomically(folder / "soak.json", json.dumps(as_dict(report)) + "\n")
    plot(report, folder / "soak.png")
    return report


def _command(options: SoakOptions, overrides: Sequence[str]) -> list[str]:
    keys = {
        "recipe": options.recipe,
        "size": options.size,
        "nproc": options.nproc,
        "run.dir": f"{options.folder}/run",
        "run.resume": "false",
        "train.steps": options.steps,
        "train.eval_every": options.every,
        "train.save_every": options.every,
        "train.global_batch": options.nproc,
        **SHORT_ROWS,
    }
    texts = [f"{key}={value}" for key, value in keys.items()]
    return module_command("zoo", "train", *texts, *overrides)


def _watch(command: list[str], folder: Path) -> list[Mark]:
    """Run the command to its end and look at it meanwhile."""
    log, marks, began = _Log(folder / "run" / "train.jsonl"), [], time.monotonic()
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                seen = [sample for pid in _tree(process.pid) if (sample := _look(pid)) is not None]
                step = log.step()
                if seen and step:
                    memory, files, cpu = (sum(values) for values in zip(*seen, strict=True))
                    marks.append(Mark(step, time.monotonic() - began, memory, int(files), cpu))
                time.sleep(PERIOD)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise UserError(f"the run has ended with exit code {process.returncode}; {folder / 'out.txt'} says why")
    return marks


class _Log:
    """The step that a growing train.jsonl has come to."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.last = path, 0, 0

    def step(self) -> int:
        """Read what is new."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                file.seek(self.offset)
                new = file.read()
            whole, _, _ = new.rpartition(b"\n")
            self.offset += len(whole) + 1 if whole else 0
            for line in whole.splitlines()[-20:]:
                self.last = max(self.last, (line_of_json(line) or {}).get("step", 0))
        return self.last


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    pids = [pid]
    for parent in pids:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                text = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                pids += [int(child) for child in text.split()]
        except OSError:  # it has ended meanwhile
            continue
    return pids


def _look(pid: int) -> tuple[float, int, float] | None:
    """(MiB resident, open files, seconds of processor time) of a process; None where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    ticks = int(stat[11]) + int(stat[12])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, ticks / os.sysconf("SC_CLK_TCK")


def _report(options: SoakOptions, marks: list[Mark], records: list[JsonObject], seconds: float) -> SoakReport:
    steps_ms = [record["step_ms"] for record in records if "event" not in record]
    names = [record["event"] for record in records if "event" in record]
    tenth = (options.steps - options.after) // 10
    windows = ((options.after, options.after + tenth), (options.steps - tenth, options.steps))

    def growth(metric: Callable[[list[Mark]], float]) -> Growth:
        chosen = [[m for m in marks if low <= m.step <= high] for low, high in windows]
        if any(len(some) < 2 for some in chosen):
            raise UserError("the run is too fast to be watched: a window is over at once; give more steps")
        return Growth(*map(metric, chosen))

    return SoakReport(
        options=options,
        seconds=seconds,
        events={name: names.count(name) for name in sorted(set(names))},
        marks=marks,
        steps_ms=steps_ms,
        memory=growth(lambda some: median(mark.memory for mark in some)),
        files=growth(lambda some: median(mark.files for mark in some)),
        step_ms=Growth(*(median(steps_ms[low:high]) for low, high in windows)),
        cpu_ms=growth(lambda some: 1e3 * (some[-1].cpu - some[0].cpu) / max(some[-1].step - some[0].step, 1)),
    )


def as_dict(report: SoakReport) -> JsonObject:
    """Plain values, without the single steps and with some 500 of the marks."""
    values = asdict(report)
    del values["steps_ms"]
    values["marks"] = values["marks"][:: max(len(values["marks"]) // 500, 1)]
    for name in ("memory", "files", "step_ms", "cpu_ms"):
        values[name]["growth"] = getattr(report, name).share
    return values


def table(report: SoakReport) -> str:
    """The report in a few lines."""
    options, events = report.options, report.events
    tenth = (options.steps - options.after) // 10
    first, last = f"{options.after}..{options.after + tenth}", f"{options.steps - tenth}..{options.steps}"
    rows = [
        ("memory, MiB", report.memory),
        ("open files", report.files),
        ("a step, ms", report.step_ms),
        ("processor time a step, ms", report.cpu_ms),
    ]
    happened = ", ".join(f"{count} {name}" for name, count in events.items())
    return "\n".join(
        [
            f"{options.steps} steps of {options.recipe} {options.size} on {options.nproc} rank(s) in "
            f"{report.seconds / 60:.1f} min ({happened})",
            "",
            f"{'steps':<28}{first:>14}{last:>14}{'growth':>9}",
            *(f"{name:<28}{g.first:>14.1f}{g.last:>14.1f}{g.share:>+9.1%}" for name, g in rows),
            "",
            f"{Path(options.folder) / 'soak.png'}",
        ]
    )


def plot(report: SoakReport, path: Path) -> Path:
    """Draw memory, open files and step time over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    marks, options = report.marks, report.options
    x = [mark.step for mark in marks]
    figure, (memory, files, time_) = pyplot.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    memory.plot(x, [mark.memory for mark in marks], color="tab:blue", linewidth=1)
    memory.set(ylabel="MiB", title=f"resident memory ({report.memory.share:+.1%} after step {options.after})")
    files.plot(x, [mark.files for mark in marks], color="tab:green", linewidth=1)
    files.set(ylabel="open files", title=f"open files ({report.files.share:+.1%})")
    width = max(len(report.steps_ms) // 200, 1)
    starts = range(0, len(report.steps_ms), width)
    middle = [median(report.steps_ms[start : start + width]) for start in starts]
    time_.plot([start + width / 2 for start in starts], middle, color="tab:purple", label="by the clock")
    every = max(len(marks) // 40, 1)
    cpu = [
        (late.step, 1e3 * (late.cpu - early.cpu) / (late.step - early.step))
        for early, late in zip(marks[::every], marks[every::every], strict=False)
        if late.step > early.step
    ]
    if cpu:
        time_.plot(*zip(*cpu, strict=True), color="tab:orange", label="processor, with saves and evaluations")
    time_.set(
        ylabel="ms",
        xlabel="optimizer step",
        title=f"time of a step ({report.step_ms.share:+.1%}, processor {report.cpu_ms.share:+.1%})",
    )
    for axis in (memory, files, time_):
        axis.set_ylim(0, None)
        axis.axvline(options.after, color="0.6", linestyle=":")
        axis.grid(alpha=0.3)
    time_.legend()
    with replaced(path) as partial:
        figure.savefig(partial, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(script.main(__doc__, SoakOptions, run, table, as_dict, takes_recipe_keys=True))
