"""Rows whose answers are shown while training are spread over the held-out rows."""

from types import SimpleNamespace
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.row_set import RowSet
from zoo.data.sources.rows import Message, Row
from zoo.generation.predictions import SEARCHED, _chosen


def row(number: int, kind: str) -> Row:
    return Row((Message("user", "?"), Message("assistant", f"{number}")), source=f"x:{number}", kind=kind)


class Finder:
    """Has the answer of each row but the `bad` ones."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def prompt(self, given: Row) -> Any:
        answer = given.messages[-1][1]
        if int(answer) in self.bad:
            raise RowError(given.source, "corrupt_media", "broken.")
        return SimpleNamespace(reference=answer)


class HeldOut(list[Row]):
    """Rows as a source has them."""

    @property
    def rows(self) -> RowSet:
        return RowSet([list(self)], ["x"])


def chosen(kinds: list[str], most: int, *bad: int) -> list[int]:
    held_out: Any = HeldOut(row(number, kind) for number, kind in enumerate(kinds))
    finder: Any = Finder(*bad)
    found = _chosen(finder, held_out, most)
    assert list(found.values()) == [str(number) for number in found]
    known: Any = Finder()
    assert not set(_chosen(known, held_out, most, set(bad))) & set(bad), "what evaluating left out is not asked again"
    return list(found)


def test_they_are_spread_over_all_rows_and_kinds() -> None:
    assert chosen(["image"] * 9, 3) == [0, 4, 8]
    assert chosen(["image"] * 9, 3, 4) == [0, 1, 8]  # one that can't be used has another in its place
    assert chosen(["image"] * 10 + ["audio"] * 10, 4) == [0, 9, 10, 19]
    assert chosen(["image"] * 3, 8) == [0, 1, 2]
    many = chosen(["image"] * 40 * SEARCHED + ["audio"] * 10 * SEARCHED, 4)
    assert many[0] == 0 and many[1] < 40 * SEARCHED <= many[2] and many[3] == 50 * SEARCHED - 1
    assert chosen([], 3) == []
