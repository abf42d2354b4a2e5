"""Rows of the bundled digits that are text, and conversations about them, for families that take nothing else."""

from __future__ import annotations

from typing import Any

from support.rows import Example, held_out, named_examples

# The shortest and the longest of the first held-out rows of text.
NAMES = ("text-short", "text-long", "turns", "system", "long")


def conversations() -> dict[str, dict[str, Any]]:
    """Rows of several turns, with a system turn, and one longer than any of the bundled ones, by their names."""

    def messages(*said: str, system: str = "") -> dict[str, Any]:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        return {"messages": [{"role": "system", "content": system}] * bool(system) + turns}

    return {
        "turns": messages("Say 31 again.", "31", "And 7?", "7", "Copy 902 4.", "902 4"),
        "system": messages("Count.", "1, 2, 3", system="Be brief."),
        "long": messages("Say " + " ".join(map(str, range(60))), " ".join(map(str, range(59, 0, -1)))),
    }


def text_examples(processor: Any) -> dict[str, Example]:
    """The rows of NAMES through the family's processor."""
    return named_examples(processor, held_out(), ("text",), conversations())
