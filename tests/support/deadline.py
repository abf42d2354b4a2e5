"""A time after which no test starts: pytest -m slow --until 1767225600 (seconds since 1970); it lists what it leaves out.

A test that needs more than DEFAULT_MINUTES says so, `@pytest.mark.slow(minutes=20)`: it doesn't start where fewer are left.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

DEFAULT_MINUTES = 4.0
LEFT = "left out: no time remains"


def minutes(item: pytest.Item) -> float:
    """How long a test may take."""
    marker = item.get_closest_marker("slow")
    return float(marker.kwargs.get("minutes", DEFAULT_MINUTES)) if marker else 0.0


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="SECONDS", help="start no test after this time (since 1970)")


def leave_out_when_late(item: pytest.Item) -> None:
    """Skip a test that would end after `--until`; a test that failed before and gets no second try fails."""
    until: float | None = item.config.getoption("--until", default=None)
    if until is None or time.time() + 60 * minutes(item) <= until:
        return
    if item.config.getoption("lf", default=False):
        pytest.fail("it failed beside other tests, and no time remains to run it alone", pytrace=False)
    pytest.skip(LEFT)


def list_left_out(reporter: pytest.TerminalReporter) -> None:
    """Name the files whose tests `--until` left out, with their number."""
    skipped = reporter.stats.get("skipped", [])
    files = Counter(report.nodeid.partition("::")[0] for report in skipped if LEFT in str(report.longrepr))
    if files:
        reporter.section(f"{files.total()} tests left out: no time remained for them")
        for file, number in files.items():
            reporter.write_line(f"{file}: {number}")
