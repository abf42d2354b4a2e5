"""The slow tests dealt into pieces that continuous integration runs in turn, and a time after which no test starts.

    pytest -m slow --turn 2/5              # the second of five pieces
    pytest -m slow --until 1767225600      # seconds since 1970; what has not started by then is left out and listed

A test that needs more than DEFAULT_MINUTES says so, `@pytest.mark.slow(minutes=20)`: it starts first, and not at all where
fewer minutes are left.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterable

import pytest

DEFAULT_MINUTES = 4.0
LEFT = "left out: no time remains"


def pieces(names: Iterable[str], count: int) -> dict[str, int]:
    """The piece, 0 to count-1, of each test id. Each piece has an equal share of each file's tests."""
    seen: Counter[str] = Counter()
    found = {}
    for name in names:
        file = name.partition("::")[0]
        found[name] = (zlib.crc32(file.encode()) + seen[file]) % count
        seen[file] += 1
    return found


def minutes(item: pytest.Item) -> float:
    """How long a test may take."""
    marker = item.get_closest_marker("slow")
    return float(marker.kwargs.get("minutes", DEFAULT_MINUTES)) if marker else 0.0


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--turn", metavar="K/N", help="of N pieces of the selected tests, run the K-th")
    parser.addoption("--until", type=float, metavar="SECONDS", help="start no test after this time (since 1970)")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--turn`; under `--until` the longest come first."""
    if config.getoption("--until", default=None) is not None:
        items.sort(key=lambda item: -minutes(item))
    turn: str | None = config.getoption("--turn", default=None)
    if not turn or config.getoption("lf", default=False):  # what failed is of this piece already
        return
    number, count = map(int, turn.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--turn {turn}: wanted K/N with K from 1 to N")
    dealt = pieces([item.nodeid for item in items], count)
    config.hook.pytest_deselected(items=[item for item in items if dealt[item.nodeid] != number - 1])
    items[:] = [item for item in items if dealt[item.nodeid] == number - 1]


def leave_out_when_late(item: pytest.Item) -> None:
    """Skip a test that would end after `--until`; a test that failed before and gets no second try fails."""
    until: float | None = item.config.getoption("--until", default=None)
    if until is None or time.time() + 60 * minutes(item) <= until:
        return
    if item.config.getoption("lf", default=False):
        pytest.fail("it failed beside other tests, and no time remains to run it alone", pytrace=False)
    pytest.skip(LEFT)


def list_left_out(reporter: pytest.TerminalReporter) -> None:
    """Name the tests that `--until` left out."""
    skipped = reporter.stats.get("skipped", [])
    names = [report.nodeid for report in skipped if LEFT in str(report.longrepr)]
    if names:
        reporter.section(f"{len(names)} tests left out: no time remained for them")
        for name in names:
            reporter.write_line(name)
