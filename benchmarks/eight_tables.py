"""Tables of what eight.sh has measured, `not measured` where it has not: `python -m benchmarks.eight_tables tables FOLDER`.

`saved RUN` prints the step of a run's last save; `disk FOLDER MB` prints the rates of that folder's disk, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
NOT = "not measured"
PUBLISHED = {(2, "padded"): "363 ms", (2, "packed"): "342 ms", (4, "padded"): "out of memory", (4, "packed"): "505 ms"}  # fmt: skip


def tables(folder: Path) -> str:
    """All tables, as Markdown."""
    return "\n\n".join(part(folder) for part in (receipts, scaling, experts, layouts, checkpoints))


def receipts(folder: Path) -> str:
    """Steps of 2 and 4 samples a GPU, padded and packed."""
    rows = []
    for (count, way), published in PUBLISHED.items():
        found = line(folder, f"receipts-{count}", way)
        rows.append([f"{count} and {8 * count}", way, published, *rates(found)])
    return table(("samples a GPU and a step", "rows", "published, 8 H100", *RATES), rows)


def scaling(folder: Path) -> str:
    """Eight GPUs against one."""
    one, eight = line(folder, "scaling-1"), line(folder, "scaling-8")
    linear = NOT
    if one and eight and "ms" in one and "ms" in eight:
        linear = f"{eight['real_tokens_per_s'] / (8 * one['real_tokens_per_s']):.1%}"
    return table(
        ("rows of 16,384 tokens", *RATES, "of linear"), [["1 GPU", *rates(one), ""], ["DP 8", *rates(eight), linear]]
    )


def experts(folder: Path) -> str:
    """30B-A3B at full depth under EP 8."""
    rows = []
    for title, name in (("Qwen3-VL 30B-A3B", "experts-vl"), ("Qwen3-Omni 30B-A3B", "experts-omni")):
        found, plan = line(folder, name), folder / f"{name}-plan.json"
        planned = NOT
        if plan.exists():
            stages = json.loads(plan.read_text())["memory_bytes"]
            planned = f"{max(stage['total'] for stage in stages) / 2**30:.1f}"
        rows.append([title, *rates(found), planned, cell(found, lambda one: f"{one['host_gib']:.1f}")])
    return table(("EP 8, rows of 8,192 tokens, selective recompute", *RATES, "planned GiB", "host GiB a rank"), rows)


def layouts(folder: Path) -> str:
    """Other layouts of eight ranks, and how far their losses are from those of DP 8."""
    rows = []
    for title, base, others in (
        ("Qwen3.5-VL 2B", ("DP 8", "layouts-dp8"), ("TP 2 x CP 2 x DP 2", "layouts-tp2-cp2-dp2")),
        ("Qwen3-VL 30B-A3B", ("EP 8", "pipeline-ep8"), ("PP 2 x EP 4", "pipeline-pp2-ep4")),
    ):
        first = line(folder, base[1])
        for layout, name in (base, others):
            found = line(folder, name)
            both = [one["losses"] for one in (first, found) if one and "ms" in one]
            apart = furthest(*both) if len(both) == 2 else NOT
            rows.append([f"{title}, {layout}", *rates(found), "" if name == base[1] else apart])
    return table(("", *RATES, "largest difference of a loss"), rows)


def checkpoints(folder: Path) -> str:
    """A save, a killed rank, a resume under another layout, an export."""
    killed, resumed = log(folder / "killed.jsonl"), log(folder / "resumed.jsonl")
    rows = [["save under EP 8", NOT], ["SIGKILL of one rank", NOT], ["resume under EP 4 x DP 2", NOT], ["export", NOT]]
    if killed:
        saved = next(one for one in killed if one.get("event") == "save")
        rate, disk = saved["bytes"] / saved["write_ms"] * 1e3, json.loads((folder / "disk.json").read_text())
        ended = json.loads((folder / "killed.json").read_text())
        rows[0][1] = (
            f"{saved['bytes'] / 1e9:.1f} GB, training waits {saved['stall_ms'] / 1e3:.2f} s, written in "
            f"{saved['write_ms'] / 1e3:.1f} s, {rate / 1e9:.2f} GB/s, {rate / disk['write']:.2f} of the disk's rate"
        )
        rows[1][1] = f"the launcher ended with {ended['exit']} after {ended['left_ms'] / 1e3:.1f} s"
    if killed and resumed:
        start = max(place for place, one in enumerate(resumed) if one.get("event") == "resume")
        load = next(one for one in resumed[start:] if one.get("event") == "startup")
        before, after = losses(killed), losses(resumed[start:])
        both = sorted(before.keys() & after.keys())
        rows[2][1] = (
            f"state loaded in {load['phases']['optimizer']:.1f} s; losses of steps {both[0]} to {both[-1]} differ by "
            f"{furthest([before[step] for step in both], [after[step] for step in both])} at most"
        )
        place = max(place for place, one in enumerate(resumed) if one.get("event") == "export")
        rows[3][1] = f"{resumed[place]['time'] - resumed[place - 1]['time']:.1f} s"
    return table(("Qwen3-VL 30B-A3B", "measured"), rows)


RATES = ("ms a step", "real tokens/s a GPU", "MFU", "peak GiB")


def rates(found: Line | None) -> list[str]:
    """The cells of RATES."""
    shown: Sequence[Callable[[Line], str]] = (
        lambda one: f"{one['ms']:.1f}",
        lambda one: f"{one['real_tokens_per_s'] / one['ranks']:,.0f}",
        lambda one: "-" if one["mfu"] is None else f"{one['mfu']:.1%}",
        lambda one: "-" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}",
    )
    return [cell(found, show) for show in shown]


def cell(found: Line | None, show: Callable[[Line], str]) -> str:
    """What a setting's metrics show, or why there are none."""
    if found is None:
        return NOT
    return show(found) if "ms" in found else "did not run"


def line(folder: Path, name: str, way: str | None = None) -> Line | None:
    """The metrics of a setting in the results of that name; None where it has not been measured."""
    file = folder / f"{name}.json"
    found = json.loads(file.read_text())["lines"] if file.exists() else []
    return next((one for one in found if way in (None, one["way"])), None)


def log(file: Path) -> list[Line]:
    """The lines of a run's log, whole ones."""
    text = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(one) for one in text if one.endswith("\n")]


def losses(lines: Iterable[Line]) -> dict[int, float]:
    """Step to loss."""
    return {one["step"]: one["loss"] for one in lines if "event" not in one}


def furthest(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The largest difference, and of how large a loss."""
    gap, of = max((abs(a - b), a) for a, b in zip(mine, theirs, strict=False))
    return f"{gap:.1e} of {of:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def main(what: str, folder: str, *rest: str) -> None:
    """One of the module's commands."""
    if what == "disk":
        from benchmarks.save_rates import disk_rates  # and torch

        print(json.dumps(disk_rates(Path(folder), int(rest[0]) * 10**6)))
    elif what == "saved":
        saves = [one["step"] for one in log(Path(folder) / "train.jsonl") if one.get("event") == "save"]
        print(saves[-1])
    else:
        print(tables(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
