"""Rows with images, videos and text of the bundled digits, and mixtures of them, for families without ears."""

from __future__ import annotations

from typing import Any

from support.rows import Example, held_out, named_examples

KINDS = ("image", "multi_image", "video", "text")
MIXTURES = ("image+video", "video+video+image", "turns")
# The shortest and the longest of the first held-out rows of each kind.
NAMES = (*(f"{kind}-{end}" for kind in KINDS for end in ("short", "long")), *MIXTURES)


def mixtures(rows: list[Any]) -> dict[str, dict]:
    """Rows with several media each, out of the files of `rows`, by the names in MIXTURES."""
    images = [row.images[0] for row in rows if row.kind == "image"]
    videos = [row.videos[0] for row in rows if row.kind == "video"]

    def turns(*texts: str) -> list[dict]:
        roles = ("user", "assistant") * len(texts)
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    return {
        "image+video": {
            "messages": turns("<image>Read it. <video>Watch.", "1 23"),
            "images": images[:1],
            "videos": videos[:1],
        },
        "video+video+image": {
            "messages": turns("First <video><video>, then <image>", "9 8"),
            "images": images[1:2],
            "videos": videos[1:3],
        },
        "turns": {"messages": turns("<image>Read.", "7", "And <image>?", "31 0"), "images": images[:2]},
    }


def vision_examples(processor: Any) -> dict[str, Example]:
    """The rows of NAMES through the family's processor."""
    rows = held_out()
    return named_examples(processor, rows, KINDS, mixtures(rows))
