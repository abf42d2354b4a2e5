"""`Adapter`: a function from a set's row to zoo's own, with the columns that tell such a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """Calls `convert(item, source)`; rows without a format that have all `columns` are told to name it."""

    convert: Callable[[dict[str, Any], str], dict[str, Any]]
    columns: tuple[str, ...]

    def __call__(self, item: dict[str, Any], source: str) -> dict[str, Any]:
        return self.convert(item, source)


def exchange(question: str, answer: str, **media: Any) -> dict[str, Any]:
    """A row of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **media}
