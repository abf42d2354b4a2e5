"""
usage: zoo report RUN [RUN ...] [out=report.html]

Writes one HTML page about a run folder, finished or not: loss, scores on held-out rows, predictions, speed, data, recipe, events. The
page needs no other file and no network. With several folders, up to 8, it compares the runs, and shows the recipe keys that differ.

  out=FILE   where the page goes; default: report.html in the first run's folder
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.cli.arguments import split_flags
from zoo.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Write the page and say where it is."""
    from zoo.tools.runs.page import report

    _, rest = split_flags(arguments, ())
    out = [text.partition("=")[2] for text in rest if text.startswith("out=")]
    folders = [text for text in rest if not text.startswith("out=")]
    if not folders or len(out) > 1 or "" in out:
        raise UserError("wanted zoo report RUN [RUN ...] [out=report.html], RUN being a run folder")
    print(report(folders, out[0] if out else None))
    return 0
