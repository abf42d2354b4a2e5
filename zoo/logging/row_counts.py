"""Rows that a run left out or made smaller, in its log whenever there are more of them."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.logging import messages
from zoo.logging.run_log import RunLog


class RowCounts:
    """What the log has of them; `budget` is packing.budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._left_out: dict[str, int] = {}
        self._shrunk = 0

    def note(self, log: RunLog, step: int, left_out: Mapping[str, int], shrunk: int) -> None:
        """Log what has changed up to this step: rows left out by cause, and rows made smaller."""
        left_out = dict(left_out)
        if left_out != self._left_out:
            log.event("rows_left_out", step, counts=left_out)
            self._left_out = left_out
        if shrunk != self._shrunk:
            if not self._shrunk:
                log.say(messages.at_shrinking(shrunk, self.budget))
            log.event("rows_shrunk", step, count=shrunk)
            self._shrunk = shrunk
