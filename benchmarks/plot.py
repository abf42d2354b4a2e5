"""Results of `zoo bench train` as a picture: ms, real tokens/s and memory against the tokens of a step.

  python -m benchmarks.plot results=bench.json out=bench.png

results=bench.json out=bench.png       what zoo bench train wrote with out=; the picture
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import script
from zoo.errors import UserError
from zoo.files import replaced
from zoo.types import JsonObject

COLOURS = {
    "packed": "tab:blue", "row": "tab:blue", "padded": "tab:orange", "padded to a width": "tab:red", "transformers": "tab:gray",
}  # fmt: skip


@dataclass(frozen=True)
class PlotOptions:
    """What is drawn, and where."""

    results: str = "bench.json"
    out: str = "bench.png"


def read_results(path: str | Path) -> JsonObject:
    """A file of results; UserError if it holds none."""
    try:
        report: JsonObject = json.loads(Path(path).read_text(encoding="utf-8"))
        if report["bench"] != "train":
            raise KeyError("bench")
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: no results of zoo bench train; it writes them with out={path}") from None
    return report


def series(lines: Sequence[JsonObject]) -> dict[str, list[JsonObject]]:
    """Lines that belong together, by the tokens of a step."""
    curves: dict[str, list[JsonObject]] = {}
    for line in sorted(lines, key=lambda line: line["tokens_per_step"]):
        way = "transformers" if line["way"] == "hf" else line["way"]
        if line["width"]:
            way += " to a width"
        ranks = f", {line['ranks']} GPUs" if line["ranks"] > 1 else ""
        name = f"{way}{ranks}" if line["way"] == "hf" else f"{way}, {line['backend']}{ranks}"
        curves.setdefault(name, []).append(line)
    return curves


def draw(options: PlotOptions) -> Path:
    """Draw the picture as a PNG; UserError if nothing was measured."""
    report, path = read_results(options.results), Path(options.out)
    lines = [line for line in report["lines"] if "ms" in line]
    if not lines:
        raise UserError(f"{options.results}: nothing was measured, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [("ms", "ms a step"), ("real_tokens_per_s", "real tokens / s")]
    if any(line["peak_gib"] for line in lines):
        shown.append(("peak_gib", "peak memory, GiB"))
    figure, panels = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 4), layout="constrained", squeeze=False)
    for panel, (key, title) in zip(panels[0], shown, strict=True):
        for name, points in series(lines).items():
            way = name.partition(", ")[0].removesuffix(" to a width")
            colour = COLOURS["padded to a width" if name.startswith("padded to") else way]
            style = ":" if ", te" in name else "-"
            x, y = [line["tokens_per_step"] for line in points], [line[key] for line in points]
            panel.plot(x, y, style, marker="s" if way == "row" else "o", color=colour, label=name)
        panel.set(xlabel="tokens a step, padding included", title=title, xlim=(0, None), ylim=(0, None))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    gpus = (report["environment"] or {}).get("gpus") or ["CPU"]
    figure.suptitle(f"{report['recipe']} size={report['size']}, {gpus[0]}, {report['date']}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(script.main(__doc__, PlotOptions, draw, lambda path: f"drawn to {path}", str))
