"""plots/loss.png of a run folder: losses by step, and exact match on held-out rows by kind; of sampled answers `policy_plot`'s panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.files import replaced
from zoo.logging.policy_plot import KEYS, draw_panels
from zoo.logging.progress_line import MAIN, TITLES
from zoo.logging.result import records
from zoo.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_losses(folder: Path) -> Path | None:
    """Draw `folder`/plots/loss.png from its train.jsonl; returns the file, or None where no step was logged."""
    steps: list[JsonObject] = []
    evals: list[JsonObject] = []
    for record in records(folder):
        if "event" not in record:
            steps.append({key: record[key] for key in KEYS if key in record})
        elif record["event"] == "eval" and record.get("by_kind"):
            evals.append(record)
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sampled = "reward" in steps[-1]
    rows, count, width = (2, 3, 14) if sampled else (1, 2, 11) if evals else (1, 1, 7)
    figure, panels = pyplot.subplots(rows, count, figsize=(width, 4 * rows), layout="constrained", squeeze=False)
    if sampled:
        draw_panels([axis for number, axis in enumerate(panels.flat) if number != 1], steps, evals)
        panels[0, 1].set_visible(bool(evals))
    else:
        _losses(panels[0, 0], steps, evals)
    if evals:
        _exact_match(panels[0, 1], evals)
    figure.suptitle(folder.resolve().name, parse_math=False)
    path = folder / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as partial:
        figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    return path


def _losses(axis: Axes, steps: list[JsonObject], evals: list[JsonObject]) -> None:
    good = [r for r in steps if "skipped" not in r]
    x = [r["step"] for r in good]
    y = [_height(r["loss"]) for r in good]
    axis.plot(x, y, color="tab:blue", alpha=0.35, linewidth=1, label="training")
    axis.plot(x, smoothed(y), color="tab:blue", linewidth=2, label="training, smoothed")
    if len(good) < len(steps):
        skipped = [r["step"] for r in steps if "skipped" in r]
        axis.plot(skipped, [0] * len(skipped), "x", color="tab:red", label="not applied", clip_on=False)
    if evals:
        x, y = [r["step"] for r in evals], [_height(r.get("loss")) for r in evals]
        axis.plot(x, y, "o-", color="tab:orange", label="held out")
    axis.set(xlabel="optimizer step", ylabel="loss (nats a label)", ylim=(0, None), title="loss")
    axis.grid(alpha=0.3)
    axis.legend()


def _height(value: float | None) -> float:
    return math.nan if value is None else value


def _exact_match(axis: Axes, evals: list[JsonObject]) -> None:
    """Lines over the steps, or bars where there is a single evaluation."""
    kinds = sorted({kind for r in evals for kind in r["by_kind"]})
    score = next((name for name in MAIN if all(name in r for r in evals)), MAIN[0])
    axis.set_title(f"{TITLES[score]} on held-out rows")
    if len(evals) == 1:
        shares = [evals[0]["by_kind"][kind] for kind in kinds]
        names = [f"{kind} ({share.get('rows', '?')})" for kind, share in zip(kinds, shares, strict=True)]
        heights = [_height(share.get(score)) for share in shares]
        bars = axis.barh(names, heights, color="tab:green")
        axis.bar_label(bars, [f"{height:.0%}" for height in heights], padding=3)
        axis.set(xlim=(0, 1.1), xlabel=f"share of rows, at step {evals[0]['step']}")
        axis.invert_yaxis()
        return
    for kind in kinds:
        points = [(r["step"], _height(r["by_kind"][kind].get(score))) for r in evals if kind in r["by_kind"]]
        axis.plot(*zip(*points, strict=True), "o-", linewidth=1, markersize=4, label=kind)
    axis.set(xlabel="optimizer step", ylabel="share of rows", ylim=(-0.02, 1.02))
    axis.grid(alpha=0.3)
    axis.legend()


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a twentieth of the values, cut off at both ends; values that are not finite don't count."""
    reach = len(values) // 40
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    cumulative = [0.0, *accumulate(finite)]
    counts = [0, *accumulate(math.isfinite(value) for value in values)]
    means = []
    for index in range(len(values)):
        first, end = max(index - reach, 0), min(index + reach + 1, len(values))
        count = counts[end] - counts[first]
        means.append((cumulative[end] - cumulative[first]) / count if count else math.nan)
    return means
