"""The command line that the scripts share: `python -m benchmarks.NAME [key=value ...] [--json | --help]`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.bench.options import read_options, split_recipe_keys
from zoo.errors import UserError, file_error
from zoo.files import expanded
from zoo.parallel.process_state import quiet


def main[Options, Report](
    doc: str | None,
    kind: type[Options],
    measure: Callable[..., Report],
    table: Callable[[Report], str],
    as_dict: Callable[[Report], Any] = lambda report: report,
    takes_recipe_keys: bool = False,
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure with the options of the command line, and print a table or, with --json, JSON.

    Args:
        doc: what --help prints.
        kind: the dataclass that `key=value` fills.
        measure: gets the options and, with `takes_recipe_keys`, a list of the arguments whose keys have a dot.

    Returns:
        The exit code: 2 for a mistake in the options, which is printed in one line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words:
        print((doc or "").strip())
        return 0
    quiet()
    own = [text for text in words if text != "--json"]
    further: list[list[str]] = []
    if takes_recipe_keys:
        own, recipe_keys = split_recipe_keys(own)
        further = [recipe_keys]
    try:
        report = measure(read_options(kind, own), *further)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(as_dict(report), indent=2) if "--json" in words else table(report))
    return 0


@contextmanager
def scratch(folder: str) -> Iterator[Path]:
    """A new folder within `folder`, which is made if it is missing; removed at the end.

    Raises:
        UserError: it can't be made; names `folder`.
    """
    parent = expanded(folder).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".zoo-bench-", dir=parent)
    except OSError as error:
        error.filename = f"folder={folder}"
        raise file_error(error) or error from None
    with temporary as name:
        yield Path(name)
