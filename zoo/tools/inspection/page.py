"""A page of packed rows that says of every span what it is: one file, without scripts from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.files import write_atomically
from zoo.pages import render
from zoo.tools.inspection.lengths import Lengths
from zoo.tools.inspection.picture import COLOURS, NAMES, SPACE, TIME
from zoo.tools.inspection.rows import KINDS, MEDIA, PackedRow


def write_page(rows: Sequence[PackedRow], lengths: Lengths, title: str, picture: str, path: Path) -> Path:
    """Write the page; `picture` is the file beside it that it links."""
    page = render(
        "zoo.tools.inspection",
        "page.html.jinja",
        title=title,
        rows=rows,
        lengths=lengths,
        picture=picture,
        curves=_curves,
        kinds=KINDS,
        media=MEDIA,
        names=NAMES,
        colours=COLOURS,
        time=TIME,
        space=SPACE,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def _curves(row: PackedRow) -> Iterator[tuple[str, str]]:
    """Position ids as (colour, points of an SVG line), one for each axis and sample; the time axis lies on top."""
    scale = 44 / max(1.0, float(row.positions.max()))
    for axis in reversed(range(row.positions.shape[0])):
        for segment in row.segments:
            values = row.positions[axis, segment.start : segment.end].tolist()
            yield (
                TIME if axis == 0 else SPACE,
                " ".join(
                    f"{segment.start + index + 0.5:g},{45 - value * scale:.1f}" for index, value in _corners(values)
                ),
            )


def _corners(values: list[float]) -> list[tuple[int, float]]:
    """(index, value) where the slope changes, and both ends."""
    last = len(values) - 1
    return [
        (index, value)
        for index, value in enumerate(values)
        if index in (0, last) or value - values[index - 1] != values[index + 1] - value
    ]
