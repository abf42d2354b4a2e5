"""Results of `zoo bench train` as a picture and as tables of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.errors import UserError
from zoo.files import replaced, write_atomically

COLOURS = {
    "packed": "tab:blue", "row": "tab:blue", "padded": "tab:orange", "padded to a width": "tab:red", "transformers": "tab:gray",
}  # fmt: skip


def read(path: str | Path) -> dict[str, Any]:
    """A file of results; UserError where it is none."""
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if report["bench"] != "train":
            raise KeyError("bench")
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: no results of zoo bench train; it writes them with out={path}") from None
    return report


def measured(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that have metrics."""
    return [line for line in report["lines"] if "ms" in line]


def series(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lines that belong together, by the tokens of a step."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["tokens_per_step"]):
        way = "transformers" if line["way"] == "hf" else line["way"]
        if line["width"]:
            way += " to a width"
        ranks = f", {line['ranks']} GPUs" if line["ranks"] > 1 else ""
        name = f"{way}{ranks}" if line["way"] == "hf" else f"{way}, {line['backend']}{ranks}"
        found.setdefault(name, []).append(line)
    return found


def draw(report: dict[str, Any], path: Path) -> Path:
    """Milliseconds, real tokens a second and memory of a step against its tokens, padding included, as a PNG.

    Raises:
        UserError: nothing was measured.
    """
    lines = measured(report)
    if not lines:
        raise UserError(f"{report['command']}: nothing was measured, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [("ms", "ms a step"), ("real_tokens_per_s", "real tokens / s")]
    if any(line["peak_gib"] for line in lines):
        shown.append(("peak_gib", "most memory in use, GiB"))
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 4), layout="constrained", squeeze=False
    )
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
    figure.suptitle(
        f"{report['recipe']} size={report['size']}, {gpus[0]}, {report['date']}", fontsize="medium"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    return path


HEAD = (
    "setting", "backend", "GPUs", "ms", "quartiles", "tokens a step", "real", "real tokens/s", "samples/s", "MFU",
    "of it tower", "peak GiB", "reserved GiB", "s to the first step",
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """The command, what it ran on, and its metrics."""
    environment = report["environment"] or {}
    packages = ", ".join(f"{n} {v}" for n, v in environment.get("packages", {}).items() if v)
    gpus = environment.get("gpus") or []
    rows = [_row(line) for line in report["lines"]]
    table = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join(
        [
            f"`{report['command']}`",
            "",
            f"{report['date']}; {f'{len(gpus)} x {gpus[0]}' if gpus else 'no GPU'}; Python {environment.get('python', '-')}; {packages}.",
            "",
            *("| " + " | ".join(row) + " |" for row in table),
        ]
    )


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    start = (line["name"], line["backend"], str(line["ranks"]))
    if "ms" not in line:
        why = next(
            (f"{word}: {line[word]}" for word in ("skipped", "failed") if word in line), "out of memory"
        )
        return (*start, why, *[""] * (len(HEAD) - 4))
    low, high = line["ms_quartiles"]
    mfu, parts = line["mfu"], line["mfu_parts"] or {}
    return (
        *start,
        f"{line['ms']:,.1f}",
        f"{low:,.1f} to {high:,.1f}",
        f"{line['tokens_per_step']:,}",
        f"{line['real_share']:.0%}",
        f"{line['real_tokens_per_s']:,.0f}",
        f"{line['samples_per_s']:.2f}",
        "-" if mfu is None else f"{mfu:.1%}",
        "-" if mfu is None else f"{parts.get('vision', 0.0):.1%}",
        *("-" if line[key] is None else f"{line[key]:.1f}" for key in ("peak_gib", "reserved_gib")),
        f"{line['startup_s']:.1f}",
    )


def fill(page: Path, results: Sequence[Path], images: Path) -> None:
    """Put tables and pictures of result files into a page, between its lines `<!-- results -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    before, opening, rest = text.partition("<!-- results -->\n")
    _, closing, after = rest.partition("<!-- end -->")
    if not opening or not closing:
        raise UserError(f"{page}: no lines <!-- results --> and <!-- end --> to put results between")
    parts = []
    for path in results:
        report = read(path)
        parts.append(f"### {path.stem}\n\n{markdown(report)}\n")
        if len(measured(report)) > 2:
            picture = draw(report, images / f"bench_{path.stem}.png")
            parts.append(f"![{path.stem}]({picture.relative_to(page.parent)})\n")
    body = "\n".join(parts)
    filled = f"\n{body}\n" if body else ""
    write_atomically(page, f"{before}{opening}{filled}{closing}{after}")
