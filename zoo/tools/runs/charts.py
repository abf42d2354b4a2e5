"""Line charts as SVG, in a page without scripts or styles from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from zoo.logging.loss_plot import smoothed
from zoo.pages import render
from zoo.tools.runs.history import Series

# Okabe and Ito's colours, which people with any colour vision can tell apart; black is for text.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#666666")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_POINTS = 600  # of a line: about one a pixel


@dataclass(frozen=True)
class Line:
    """A curve: points in order of x, without values that are not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    faint: bool = False  # the raw values behind a smoothed curve: without an entry in the legend
    dots: bool = False  # few points, each of which is marked


def lines_of(name: str, series: Series, colour: str, smooth: bool = True) -> list[Line]:
    """A training metric: lowest and highest values in short ranges of steps, and the running mean where that is wanted."""
    raw = thinned(zip(series.steps, series.values, strict=True))
    if not smooth or len(series.steps) < 20:
        return [Line(name, raw, colour)]
    means = list(zip(series.steps, smoothed(series.values), strict=True))
    every = max(1, len(means) // _POINTS)
    kept = [*means[::every], means[-1]]
    smooth_points = [point for point in kept if math.isfinite(point[1])]
    return [Line(name, raw, colour, faint=True), Line(name, smooth_points, colour)]


def thinned(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 2 * _POINTS of the points: the lowest and the highest of each range, so that no spike is lost."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= 2 * _POINTS:
        return finite
    size = math.ceil(len(finite) / _POINTS)
    kept: list[tuple[float, float]] = []
    for first in range(0, len(finite), size):
        some = finite[first : first + size]
        low, high = min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def chart(title: str, lines: Sequence[Line], *, unit: str = "", zero: bool = False, share: bool = False) -> Markup:
    """A figure with axes, a legend where there are several names, and its points for the page's script.

    Args:
        unit: of the vertical axis.
        zero: it begins at 0.
        share: it goes from 0 to 1 and is labelled in percent.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup()
    x = _Axis([0.0, *(point[0] for line in lines for point in line.points)], _LEFT, _WIDTH - _RIGHT)
    values = [point[1] for line in lines for point in line.points]
    values += [0.0] if zero else [0.0, 1.0] if share else []
    y = _Axis(values, _HEIGHT - _BOTTOM, _TOP)
    legend = {line.name: line.colour for line in lines if not line.faint}
    points = [
        {"name": line.name, "colour": line.colour, "points": [[round(x.at(a), 1), a, b] for a, b in line.points]}
        for line in lines
        if not line.faint
    ]
    y_text = (lambda value: f"{value:.0%}") if share else number
    return render(
        "zoo.tools.runs", "chart.html.jinja", title=title, unit=unit,
        width=_WIDTH, height=_HEIGHT, left=_LEFT, right=_WIDTH - _RIGHT, top=_TOP, bottom=_HEIGHT - _BOTTOM,
        y_ticks=[(round(y.at(value), 1), y_text(value)) for value in y.ticks(5)],
        x_ticks=[(round(x.at(value), 1), number(value)) for value in x.ticks(6) if value == int(value)],
        curves=[_drawn(line, x, y) for line in sorted(lines, key=lambda line: not line.faint)],
        legend=legend if len(legend) > 1 else {},
        data=json.dumps({"lines": points, "share": share}),
    )  # fmt: skip


class _Axis:
    """Values to coordinates, and round numbers between the ends."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        if low == high:
            low, high = (low - abs(low) * 0.05, high + abs(high) * 0.05) if low else (0.0, 1.0)
        self.low, self.high, self.first, self.last = low, high, first, last

    def at(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self, about: int) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((power * factor for factor in (1, 2, 5) if power * factor >= rough), power * 10)
        start = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(start, math.floor(self.high / step + 1e-9) + 1)]


def _drawn(line: Line, x: _Axis, y: _Axis) -> Line:
    """The line in the coordinates of the drawing."""
    points = [(round(x.at(a), 1), round(y.at(b), 1)) for a, b in line.points]
    return replace(line, points=points, dots=line.dots or len(points) == 1)


def number(value: float) -> str:
    """A few digits: 12, 3.5, 1,200, 40k, 1.2e-05."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return f"{value:.2g}"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
