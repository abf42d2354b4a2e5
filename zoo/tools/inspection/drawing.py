"""Packed rows to look at: an image to scale, with the lengths of all samples beneath, and a page that explains every span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.files import replaced, write_atomically
from zoo.pages import render
from zoo.tools.inspection.lengths import Lengths
from zoo.tools.inspection.rows import KINDS, MEDIA, PackedRow, Segment
from zoo.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "prompt": "#c3cde0", "image": "#2f74c0", "video": "#159a7c", "audio": "#ee9b1c", "label": "#8a3ea8", "padding": "#ececef",
}  # fmt: skip
NAMES = {"prompt": "prompt text", "audio": "sound", "label": "label (has loss)"}
INK, QUIET, FAINT, PAPER, TIME, SPACE = "#1d2433", "#6b7385", "#d4d8e0", "#ffffff", "#d1345b", "#9aa3b5"
BAR, CURVE, PITCH = 0.8, 0.8, 2.75  # heights of tokens and positions, and from a row to the next
_SPOKEN = 4  # answers whose codes are drawn
_NARROW = 0.03  # of the width: samples below it are not labelled
_LETTER = 0.0046  # width of a letter of a sample's name, of the image's


def write_page(rows: Sequence[PackedRow], lengths: Lengths, title: str, drawing: str, path: Path) -> Path:
    """Write the page, one file without scripts; `drawing`: the file next to it that it links."""
    page = render(
        "zoo.tools.inspection", "page.html.jinja", title=title, rows=rows, lengths=lengths, picture=drawing,
        curves=_curves, kinds=KINDS, media=MEDIA, names=NAMES, colours=COLOURS, time=TIME, space=SPACE,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def _curves(row: PackedRow) -> Iterator[tuple[str, str]]:
    """Position ids as (colour, points of an SVG line), one for each axis and sample; the time axis lies on top."""
    scale = 44 / max(1.0, float(row.positions.max()))
    for axis in reversed(range(row.positions.shape[0])):
        for segment in row.segments:
            values = row.positions[axis, segment.start : segment.end].tolist()
            ends = (0, len(values) - 1)
            points = [
                f"{segment.start + index + 0.5:g},{45 - value * scale:.1f}"
                for index, value in enumerate(values)
                if index in ends or value - values[index - 1] != values[index + 1] - value  # the slope changes
            ]
            yield TIME if axis == 0 else SPACE, " ".join(points)


def draw(rows: Sequence[PackedRow], lengths: Lengths, title: str, path: Path) -> Path:
    """Write the image, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context({"font.size": 9, "text.color": INK, "hatch.linewidth": 0.5}):
        height = 1.2 + 0.78 * PITCH * len(rows) * 0.62
        figure = plt.figure(figsize=(14, height + 3.4), facecolor=PAPER, layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(height, 3.4))
        upper, lower = parts
        _draw_rows(upper.subplots(), rows)
        left, right = lower.subplots(1, 2)
        _draw_lengths(left, lengths)
        _draw_fillings(right, lengths)
        figure.suptitle(title, fontsize=12.5, weight="bold", x=0.01, ha="left", parse_math=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as partial:
            figure.savefig(partial, dpi=110)
        plt.close(figure)
    return path


def draw_speech(rows: Sequence[PackedRow], path: Path) -> Path | None:
    """Write an image of what is spoken, a PNG: each answer's codes by frame, beneath the text that is read with it. None without speech."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    spoken = [segment for row in rows for segment in row.segments if segment.speech is not None][:_SPOKEN]
    if not spoken:
        return None
    with matplotlib.rc_context({"font.size": 9, "text.color": INK}):
        figure = plt.figure(figsize=(14, 2.6 * len(spoken)), facecolor=PAPER, layout="constrained")
        axes: Any = figure.subplots(len(spoken), 1, squeeze=False)[:, 0]
        for axis, segment in zip(axes, spoken, strict=True):
            assert segment.speech is not None
            codes = segment.speech.codes.numpy()
            axis.imshow(codes.T, aspect="auto", cmap="viridis", interpolation="nearest")
            words = ["\N{DOWNWARDS ARROW} " + word.strip() if word.strip() else "" for word in segment.speech.words]
            marks = [index for index, word in enumerate(words) if word]
            axis.set_xticks(
                [index - 1 for index in marks],
                [words[index] for index in marks],
                rotation=60,
                ha="left",
                fontsize=7,
                parse_math=False,
            )
            axis.xaxis.tick_top()
            axis.set_xlim(-1.5, len(codes) - 0.5)
            axis.set(ylabel="codebook", xlabel=f"{len(codes)} frames, each beneath the text that it is read with")
            axis.set_title(f"{segment.source} {segment.kind or ''}", loc="left", parse_math=False)
            _plain(axis)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as partial:
            figure.savefig(partial, dpi=110)
        plt.close(figure)
    return path


def _draw_rows(axis: Axes, rows: Sequence[PackedRow]) -> None:
    from matplotlib import lines, patches

    width = max(row.width for row in rows)
    for number, row in enumerate(rows):
        _draw_row(axis, row, number * PITCH, width)
    seen = {span.kind for row in rows for segment in row.segments for span in segment.spans}
    seen |= {"padding"} if any(row.padding for row in rows) else set()
    handles: list[Any] = [
        patches.Patch(
            facecolor=COLOURS[kind], label=NAMES.get(kind, kind), edgecolor="#c3c6ce", linewidth=0,
            hatch="////" if kind == "padding" else None,
        )
        for kind in KINDS if kind in seen
    ]  # fmt: skip
    axes = rows[0].positions.shape[0]
    handles.append(lines.Line2D([], [], color=TIME, label="position id" + (": time" if axes > 1 else "")))
    if axes > 1:
        handles.append(lines.Line2D([], [], color=SPACE, label="position id: height, width"))
    axis.legend(handles=handles, frameon=False, ncols=len(handles), loc="lower left", bbox_to_anchor=(0.0, 1.0))
    axis.set(xlim=(-0.065 * width, width * 1.005), ylim=(len(rows) * PITCH - 0.45, -0.75))
    axis.set_axis_off()


def _draw_row(axis: Axes, row: PackedRow, y: float, width: int) -> None:
    """Tokens of a row at height `y`, its samples named above and its positions beneath."""
    floor = y + BAR + 0.12 + CURVE
    _box(axis, 0, row.width, y, facecolor=COLOURS["padding"], hatch="////", edgecolor="#c3c6ce", linewidth=0)
    for number, segment in enumerate(row.segments, start=1):
        for span in segment.spans:
            _box(axis, span.start, span.end, y, facecolor=COLOURS[span.kind], linewidth=0)
        for colour, line in ((PAPER, 2.4), (INK, 0.8)):
            _box(axis, segment.start, segment.end, y, fill=False, edgecolor=colour, linewidth=line)
        _name_sample(axis, segment, number, y, width)
        _draw_positions(axis, row, segment, floor, width)
    right: JsonObject = {"ha": "right", "va": "center"}
    x = -0.008 * width
    axis.text(x, y + BAR * 0.3, f"{row.width} tokens", **right)
    share = f"{row.padding / row.width:.1%} padding"
    axis.text(x, y + BAR * 0.75, share, **right, color=QUIET, fontsize=8)
    axis.text(x, y - 0.25, row.note, **right, color=TIME, fontsize=7.5)
    axis.text(x, floor - CURVE / 2, "positions", **right, color=TIME, fontsize=8)


def _box(axis: Axes, start: float, end: float, y: float, **style: Any) -> None:
    """A rectangle over tokens `start` to `end` (exclusive) of the row at height `y`."""
    from matplotlib import patches

    axis.add_patch(patches.Rectangle((start, y), end - start, BAR, **style))


def _name_sample(axis: Axes, segment: Segment, number: int, y: float, width: int) -> None:
    """The sample's number, kind and length above it, as far as there is room."""
    size = segment.end - segment.start
    if size < _NARROW * width:
        return
    centre: JsonObject = {"ha": "center", "va": "center"}
    middle = segment.start + size / 2
    axis.text(middle, y - 0.34, str(number), **centre, weight="bold", fontsize=8)
    names = f"{segment.kind or ''} {size}".strip(), str(size)
    name = next((name for name in names if len(name) * _LETTER * width <= size), "")
    axis.text(middle, y - 0.12, name, **centre, fontsize=6.5, color=QUIET)


def _draw_positions(axis: Axes, row: PackedRow, segment: Segment, floor: float, width: int) -> None:
    """The sample's position ids as curves above `floor`, and its last one as a number."""
    positions = row.positions.numpy()
    scale = CURVE / max(1.0, float(positions.max()))
    x = np.arange(segment.start, segment.end) + 0.5
    for which in reversed(range(len(positions))):
        axis.plot(
            x, floor - positions[which, segment.start : segment.end] * scale,
            color=TIME if which == 0 else SPACE, linewidth=1.1 if which == 0 else 0.8,
        )  # fmt: skip
    axis.plot([segment.start, segment.end], [floor, floor], color=FAINT, linewidth=0.7, zorder=0)
    if segment.end - segment.start >= _NARROW * width:
        last = int(positions[:, segment.end - 1].max())
        axis.text(segment.end, floor + 0.03, str(last), ha="right", va="top", fontsize=6, color=TIME)


def _draw_lengths(axis: Axes, lengths: Lengths) -> None:
    tokens = lengths.tokens
    axis.hist(lengths.lengths, bins=min(60, max(10, lengths.samples // 20)), color=COLOURS["image"], alpha=0.8)
    top = axis.get_ylim()[1]
    for name in ("p50", "p95"):
        axis.axvline(tokens[name], color=TIME, linewidth=1)
        axis.text(tokens[name], top, f" {name} {tokens[name]:.0f}", color=TIME, va="top", fontsize=8)
    title = f"lengths of {lengths.samples} samples, {tokens['least']:.0f} to {tokens['most']:.0f} tokens"
    axis.set_title(title, loc="left")
    axis.set(xlabel="tokens of a sample", ylabel="samples")
    _plain(axis)


def _draw_fillings(axis: Axes, lengths: Lengths) -> None:
    """Bars of the padding by budget, packed and side by side."""
    shown = [filling for filling in lengths.fillings if filling.rows]
    x = np.arange(len(shown))
    for shift, name, values, colour in (
        (-0.2, "packed: of the budget left empty", [f.unfilled + f.alignment for f in shown], COLOURS["label"]),
        (0.2, "the same samples side by side", [f.side_by_side for f in shown], COLOURS["prompt"]),
    ):
        bars = axis.bar(x + shift, [100 * value for value in values], 0.38, color=colour, label=name)
        axis.bar_label(bars, [f"{value:.1%}" for value in values], fontsize=7.5, padding=2)
    axis.set_xticks(x, [f"{f.budget}" + (f"\n{f.too_long} too long" if f.too_long else "") for f in shown])
    axis.set_title("expected padding by packing.budget", loc="left")
    axis.set(ylabel="% of the tokens", ylim=(0, axis.get_ylim()[1] * 1.2))
    axis.legend(frameon=False, loc="upper right", ncols=2, fontsize=8)
    _plain(axis)


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.title.set_fontsize(10)
