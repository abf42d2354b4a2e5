"""Each invariant that the documentation states is shown by a test of the fast tier."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TESTS = REPO / "tests"
PAGES = [REPO / "docs" / name for name in ("packing-contract.md", "packing.md")]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def invariants() -> dict[str, str]:
    """Invariant: what shows it, out of the table of that name."""
    text = PAGES[0].read_text(encoding="utf-8")
    table = text.partition("| invariant | shown by, in `tests` |\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(ROW.findall(table))


def linked(text: str) -> list[str]:
    """Files and folders of tests that a text names, from the folder `tests` on."""
    return [f"tests/{path}" for path in re.findall(r"`(\w+/[\w/.]+)`", text)]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def is_slow(node: ast.AST) -> bool:
    """Whether the marker stands in a decorator or in `pytestmark`."""
    return any(isinstance(part, ast.Attribute) and part.attr == "slow" for part in ast.walk(node))


def fast_tests(file: Path) -> set[str]:
    """file::function of the tests of a file that `make test` runs at least one case of."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.Assign) and is_slow(node) for node in tree.body):
        return set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        f"{file.relative_to(REPO).as_posix()}::{node.name}"
        for node in functions
        if node.name.startswith("test_") and not any(is_slow(decorator) for decorator in node.decorator_list)
    }


@pytest.fixture(scope="module")
def fast() -> set[str]:
    """file::function of all tests that `make test` runs of the files linked."""
    places = {REPO / place for shown in invariants().values() for place in linked(shown)}
    places.add(TESTS / "unit/benchmarks/test_packing.py")
    files = {file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))}
    return set().union(*map(fast_tests, files))


def without_member(rows: Iterable[tuple[str, str]], fast: set[str]) -> list[str]:
    """Invariants of which no named file has a test in `fast`, or that name a test which is not in it."""
    functions = {name.rpartition("::")[2] for name in fast}
    return [
        invariant
        for invariant, shown in rows
        if not named(shown) <= functions or not any(name.startswith(place) for place in linked(shown) for name in fast)
    ]


def test_each_invariant_has_a_member_in_the_fast_tier(fast: set[str]) -> None:
    rows = invariants()
    assert len(rows) > 10 and all(linked(shown) for shown in rows.values())
    assert all((REPO / path).exists() for shown in rows.values() for path in linked(shown))
    assert not without_member(rows.items(), fast)


def test_tests_that_pages_name_are_fast(fast: set[str]) -> None:
    names = {name for page in PAGES for name in named(page.read_text(encoding="utf-8"))}
    assert names and names <= {name.rpartition("::")[2] for name in fast}


def test_an_invariant_without_a_member_is_found(fast: set[str]) -> None:
    gone = ("x", "`test_that_is_gone` in `unit/packing/test_layout.py`")
    slow = ("y", "`slow/test_learns.py`")
    listed = ("w", "`distributed/test_golden.py`")
    good = ("z", "`unit/packing/test_layout.py`")
    assert without_member([gone, slow, listed, good], fast) == ["x", "y", "w"]
    assert not fast_tests(TESTS / "slow/test_learns.py") and not fast_tests(TESTS / "distributed/test_golden.py")
    assert "tests/unit/test_invariants.py::test_tests_that_pages_name_are_fast" in fast_tests(Path(__file__))
