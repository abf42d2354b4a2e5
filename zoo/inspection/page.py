"""A page of packed rows that says of every span what it is: one file, without scripts from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from zoo.files import write_atomically
from zoo.inspection.lengths import Lengths
from zoo.inspection.picture import COLOURS, NAMES, SPACE, TIME
from zoo.inspection.rows import KINDS, MEDIA, PackedRow, Segment, Span

_STYLE = (
    """
body { font: 14px/1.45 system-ui, sans-serif; color: #1d2433; max-width: 1200px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 2em 0 .3em }
table { border-collapse: collapse; margin: .5em 0 } td, th { padding: .15em .8em .15em 0; text-align: right }
th { font-weight: 600; color: #6b7385 } td.text, th.text { text-align: left }
.row { display: flex; height: 34px; background: #ececef; border: 1px solid #1d2433 }
.segment { display: flex; min-width: 1px; border-right: 2px solid #fff; box-shadow: inset 0 0 0 .5px #1d2433 }
.segment i { display: block } svg { width: 100%; height: 46px; display: block }
.quiet { color: #6b7385 } details { margin: .15em 0 } summary { cursor: pointer }
pre { white-space: pre-wrap; background: #f7f8fa; padding: .6em; margin: .3em 0 .8em; overflow-wrap: anywhere }
mark { background: none; color: inherit; border-radius: 2px; padding: 0 1px }
.key { display: inline-block; width: 1em; height: 1em; vertical-align: -2px; margin: 0 .3em 0 1em }
"""
    + "".join(f".{kind} {{ background: {colour} }}\n" for kind, colour in COLOURS.items())
    + f"mark.label {{ background: {COLOURS['label']}; color: #fff }}\n"
)


def write_page(rows: Sequence[PackedRow], lengths: Lengths, title: str, picture: str, path: Path) -> Path:
    """Write the page; `picture` is the file beside it that it links."""
    keys = "".join(f'<span class="key {kind}"></span>{NAMES.get(kind, kind)}' for kind in KINDS)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p>{keys} <span style="color:{TIME};margin-left:1em">— position id: time</span> '
        f'<span style="color:{SPACE}">— height, width</span></p>',
        *(_row(number, row) for number, row in enumerate(rows, start=1)),
        "<h2>Lengths</h2>",
        _lengths(lengths),
        f'<p><a href="{escape(picture)}">{escape(picture)}</a> has all of it as a picture.</p>',
    ]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{page}<body>{''.join(body)}</body></html>\n")
    return path


def _row(number: int, row: PackedRow) -> str:
    """One row: its tokens to scale, its positions, and its samples in words."""
    strips = "".join(_strip(index, segment) for index, segment in enumerate(row.segments, start=1))
    rest = row.width - (row.segments[-1].padded_end if row.segments else 0)
    strips += (
        f'<div class="padding" style="flex:{rest} 0 0" title="{rest} tokens of padding"></div>'
        if rest
        else ""
    )
    samples = "".join(_sample(index, segment) for index, segment in enumerate(row.segments, start=1))
    return (
        f'<h2>Row {number} <span class="quiet">{row.width} tokens, {len(row.segments)} samples, '
        f"{row.padding / row.width:.1%} padding{escape(f'; {row.note}' if row.note else '')}</span></h2>"
        f'<div class="row">{strips}</div>{_curves(row)}{samples}'
    )


def _strip(number: int, segment: Segment) -> str:
    title = f"sample {number}: {segment.kind or ''} {segment.source}"
    spans = "".join(
        f'<i class="{span.kind}" style="flex:{span.end - span.start} 0 0" title="{escape(_about(span))}"></i>'
        for span in segment.spans
    )
    pad = segment.padded_end - segment.end
    spans += f'<i class="padding" style="flex:{pad} 0 0" title="{pad} tokens of padding"></i>' if pad else ""
    return (
        f'<div class="segment" style="flex:{segment.padded_end - segment.start} 0 0" title="{escape(title)}">'
        f"{spans}</div>"
    )


def _about(span: Span) -> str:
    name = NAMES.get(span.kind, span.kind)
    text = f": {span.text[:80]}" if span.text else ""
    return f"{name}, {span.end - span.start} tokens from {span.start}{text}"


def _curves(row: PackedRow) -> str:
    """Position ids as lines, one for each axis and sample."""
    scale = 44 / max(1.0, float(row.positions.max()))
    lines = []
    for which in reversed(range(row.positions.shape[0])):
        colour = TIME if which == 0 else SPACE
        for segment in row.segments:
            values = row.positions[which, segment.start : segment.end].tolist()
            points = " ".join(
                f"{segment.start + place + 0.5:g},{45 - value * scale:.1f}"
                for place, value in _corners(values)
            )
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" vector-effect="non-scaling-stroke"/>'
            )
    return f'<svg viewBox="0 0 {row.width} 46" preserveAspectRatio="none">{"".join(lines)}</svg>'


def _corners(values: list[float]) -> list[tuple[int, float]]:
    """(place, value) where the slope changes, and both ends."""
    last = len(values) - 1
    return [
        (place, value)
        for place, value in enumerate(values)
        if place in (0, last) or value - values[place - 1] != values[place + 1] - value
    ]


def _sample(number: int, segment: Segment) -> str:
    parts = [f"{segment.end - segment.start} tokens"]
    parts += [f"{count} {kind}" for kind in MEDIA if (count := segment.tokens(kind))]
    parts.append(f"{segment.tokens('label')} with loss")
    text = "".join(
        f'<mark class="{span.kind}">{escape(span.text)}</mark>'
        if span.text
        else f'<mark class="{span.kind}">&lt;{span.kind} x {span.end - span.start}&gt;</mark>'
        for span in segment.spans
    )
    return (
        f"<details><summary>{number} {escape(segment.kind or '')} "
        f'<span class="quiet">{", ".join(parts)}; {escape(segment.source)}</span></summary><pre>{text}</pre></details>'
    )


def _lengths(lengths: Lengths) -> str:
    names = "".join(f"<th>{name}</th>" for name in lengths.tokens)
    values = "".join(f"<td>{value:.0f}</td>" for value in lengths.tokens.values())
    head = "<th>budget</th><th>rows</th><th>samples a row</th><th>left empty</th><th>alignment</th><th>side by side</th><th>too long</th>"
    fillings = "".join(
        f"<tr><td>{f.budget}</td><td>{f.rows}</td><td>{f.samples_a_row:.1f}</td><td>{f.unfilled:.2%}</td>"
        f"<td>{f.alignment:.2%}</td><td>{f.side_by_side:.1%}</td><td>{f.too_long}</td></tr>"
        for f in lengths.fillings
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in lengths.kinds.items())
    media = ", ".join(f"{share:.1%} {kind}" for kind, share in lengths.media.items() if share)
    return (
        f"<p>{lengths.samples} samples ({kinds}); of their tokens {lengths.labels:.1%} have a loss"
        f"{f' and {media} are media' if media else ''}; rows left out: {escape(lengths.left_out)}.</p>"
        f"<table><tr>{names}</tr><tr>{values}</tr></table><table><tr>{head}</tr>{fillings}</table>"
    )
