"""Each invariant that the documentation states is shown by a test of the fast tier."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = [REPO / "docs" / name for name in ("packing-contract.md", "packing.md")]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def invariants() -> dict[str, str]:
    """Invariant: what shows it, out of the table `| invariant | shown by |`."""
    text = PAGES[0].read_text(encoding="utf-8")
    table = text.partition("| invariant | shown by |\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(ROW.findall(table))


def linked(text: str) -> list[str]:
    """Files and folders of tests that a text links to."""
    return re.findall(r"\]\(\.\./(tests/[\w/.]+)\)", text)


def named(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


@pytest.fixture(scope="module")
def fast() -> set[str]:
    """file::function of all tests that `make test` would run of the files linked."""
    places = sorted({place for shown in invariants().values() for place in linked(shown)})
    places += ["tests/unit/bench/test_packing.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *places]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def without_member(rows: Iterable[tuple[str, str]], fast: set[str]) -> list[str]:
    """Invariants of which no linked file has a test in `fast`, or that name a test which is not in it."""
    functions = {name.rpartition("::")[2] for name in fast}
    return [
        invariant
        for invariant, shown in rows
        if not named(shown) <= functions
        or not any(name.startswith(place) for place in linked(shown) for name in fast)
    ]


def test_each_invariant_has_a_member_in_the_fast_tier(fast: set[str]) -> None:
    rows = invariants()
    assert len(rows) > 10 and all(linked(shown) for shown in rows.values())
    assert not without_member(rows.items(), fast)


def test_tests_that_pages_name_are_fast(fast: set[str]) -> None:
    names = {name for page in PAGES for name in named(page.read_text(encoding="utf-8"))}
    assert names and names <= {name.rpartition("::")[2] for name in fast}


def test_an_invariant_without_a_member_is_found(fast: set[str]) -> None:
    gone = ("x", "`test_that_is_gone` in [a](../tests/unit/packing/test_layout.py)")
    slow = ("y", "[a](../tests/slow/test_learns.py)")
    good = ("z", "[a](../tests/unit/packing/test_layout.py)")
    assert without_member([gone, slow, good], fast) == ["x", "y"]
