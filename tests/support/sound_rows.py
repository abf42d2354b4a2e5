"""Rows with speech and text of the bundled digits, for families that hear and don't see."""

from __future__ import annotations

from typing import Any

from support.rows import Example, held_out, named_examples

KINDS = ("audio", "text")
MIXTURES = ("context", "turns", "asr")
# The shortest and the longest of the first held-out rows of each kind: a clip under one second, and one over two.
NAMES = (*(f"{kind}-{end}" for kind in KINDS for end in ("short", "long")), *MIXTURES)


def mixtures(rows: list[Any]) -> dict[str, dict]:
    """Rows of other forms, with one clip each out of the files of `rows`, by the names in MIXTURES."""
    audios = [row.audios[0] for row in rows if row.kind == "audio"]

    def row(clip: int, *turns: tuple[str, str]) -> dict:
        messages = [{"role": role, "content": text} for role, text in turns]
        return {"messages": messages, "audios": audios[clip : clip + 1]}

    return {
        "context": row(
            0, ("system", "Digits from 0 to 9."), ("user", "<audio>Write them down."), ("assistant", "1 23")
        ),
        "turns": row(
            1, ("user", "Listen: <audio>"), ("assistant", "7"), ("user", "And the second?"), ("assistant", "31 0")
        ),
        "asr": row(2, ("user", "<audio>"), ("assistant", "language English<asr_text>One, two.")),
    }


def sound_examples(processor: Any) -> dict[str, Example]:
    """The rows of NAMES through the family's processor."""
    rows = held_out()
    return named_examples(processor, rows, KINDS, mixtures(rows))
