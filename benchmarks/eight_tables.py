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
        result = line(folder, f"receipts-{count}", way)
        rows.append([f"{count} and {8 * count}", way, published, *rates(result)])
    return table(("samples a GPU and a step", "rows", "published, 8 H100", *RATES), rows)


def scaling(folder: Path) -> str:
    """Eight GPUs against one."""
    single, eight = line(folder, "scaling-1"), line(folder, "scaling-8")
    linear = NOT
    if single and eight and "ms" in single and "ms" in eight:
        linear = f"{eight['real_tokens_per_s'] / (8 * single['real_tokens_per_s']):.1%}"
    return table(
        ("rows of 16,384 tokens", *RATES, "of linear"), [["1 GPU", *rates(single), ""], ["DP 8", *rates(eight), linear]]
    )


def experts(folder: Path) -> str:
    """30B-A3B at full depth under EP 8."""
    rows = []
    for title, name in (("Qwen3-VL 30B-A3B", "experts-vl"), ("Qwen3-Omni 30B-A3B", "experts-omni")):
        result, plan = line(folder, name), folder / f"{name}-plan.json"
        planned = NOT
        if plan.exists():
            stages = json.loads(plan.read_text())["memory_bytes"]
            planned = f"{max(stage['total'] for stage in stages) / 2**30:.1f}"
        rows.append([title, *rates(result), planned, cell(result, lambda record: f"{record['host_gib']:.1f}")])
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
            result = line(folder, name)
            both = [record["losses"] for record in (first, result) if record and "ms" in record]
            apart = furthest(*both) if len(both) == 2 else NOT
            rows.append([f"{title}, {layout}", *rates(result), "" if name == base[1] else apart])
    return table(("", *RATES, "largest difference of a loss"), rows)


def checkpoints(folder: Path) -> str:
    """A save, a killed rank, a resume under another layout, an export."""
    killed, resumed = log(folder / "killed.jsonl"), log(folder / "resumed.jsonl")
    rows = [["save under EP 8", NOT], ["SIGKILL of one rank", NOT], ["resume under EP 4 x DP 2", NOT], ["export", NOT]]
    if killed:
        saved = next(record for record in killed if record.get("event") == "save")
        rate, disk = saved["bytes"] / saved["write_ms"] * 1e3, json.loads((folder / "disk.json").read_text())
        ended = json.loads((folder / "killed.json").read_text())
        rows[0][1] = (
            f"{saved['bytes'] / 1e9:.1f} GB, training waits {saved['stall_ms'] / 1e3:.2f} s, written in "
            f"{saved['write_ms'] / 1e3:.1f} s, {rate / 1e9:.2f} GB/s, {rate / disk['write']:.2f} of the disk's rate"
        )
        rows[1][1] = f"the launcher ended with {ended['exit']} after {ended['left_ms'] / 1e3:.1f} s"
    if killed and resumed:
        start = max(index for index, record in enumerate(resumed) if record.get("event") == "resume")
        load = next(record for record in resumed[start:] if record.get("event") == "startup")
        before, after = losses(killed), losses(resumed[start:])
        both = sorted(before.keys() & after.keys())
        rows[2][1] = (
            f"state loaded in {load['phases']['optimizer']:.1f} s; losses of steps {both[0]} to {both[-1]} differ by "
            f"{furthest([before[step] for step in both], [after[step] for step in both])} at most"
        )
        index = max(index for index, record in enumerate(resumed) if record.get("event") == "export")
        rows[3][1] = f"{resumed[index]['time'] - resumed[index - 1]['time']:.1f} s"
    return table(("Qwen3-VL 30B-A3B", "measured"), rows)


RATES = ("ms a step", "real tokens/s a GPU", "MFU", "peak GiB")


def rates(result: Line | None) -> list[str]:
    """The cells of RATES."""
    shown: Sequence[Callable[[Line], str]] = (
        lambda record: f"{record['ms']:.1f}",
        lambda record: f"{record['real_tokens_per_s'] / record['ranks']:,.0f}",
        lambda record: "-" if record["mfu"] is None else f"{record['mfu']:.1%}",
        lambda record: "-" if record["peak_gib"] is None else f"{record['peak_gib']:.1f}",
    )
    return [cell(result, show) for show in shown]


def cell(result: Line | None, show: Callable[[Line], str]) -> str:
    """What a setting's metrics show, or why there are none."""
    if result is None:
        return NOT
    return show(result) if "ms" in result else "did not run"


def line(folder: Path, name: str, way: str | None = None) -> Line | None:
    """The metrics of a setting in the results of that name; None where it has not been measured."""
    file = folder / f"{name}.json"
    lines = json.loads(file.read_text())["lines"] if file.exists() else []
    return next((record for record in lines if way in (None, record["way"])), None)


def log(file: Path) -> list[Line]:
    """The lines of a run's log, whole ones."""
    text = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(record) for record in text if record.endswith("\n")]


def losses(lines: Iterable[Line]) -> dict[int, float]:
    """Step to loss."""
    return {record["step"]: record["loss"] for record in lines if "event" not in record}


def furthest(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The largest difference, and of how large a loss."""
    gap, loss = max((abs(a - b), a) for a, b in zip(mine, theirs, strict=False))
    return f"{gap:.1e} of {loss:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def main(table: str, folder: str, *rest: str) -> None:
    """One of the module's commands."""
    if table == "disk":
        from benchmarks.save_rates import disk_rates  # and torch

        print(json.dumps(disk_rates(Path(folder), int(rest[0]) * 10**6)))
    elif table == "saved":
        saves = [record["step"] for record in log(Path(folder) / "train.jsonl") if record.get("event") == "save"]
        print(saves[-1])
    else:
        print(tables(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
