"""Tags of media in texts: `<image>`, `<video>` and `<audio>` stand for a row's media, or are text like any other.

A tag that is text is held with a letter in it that no text has, so that no reader takes it for a placeholder; `plain` gives the text
as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PLACEHOLDER = re.compile("<(image|video|audio)>")
_HIDDEN = "\ufdd0"  # a code point that Unicode keeps out of texts


def hidden(text: str) -> str:
    """The text with all its tags as text."""
    return PLACEHOLDER.sub(rf"<{_HIDDEN}\1>", text)


def plain(text: str) -> str:
    """The text as it was written, tags that are text included."""
    return text.replace(_HIDDEN, "") if _HIDDEN in text else text


def take_marks(text: str, left: dict[str, int]) -> str:
    """The text in which a tag is a placeholder as long as media of its kind are `left`, and text behind them.

    Args:
        text: with tags.
        left: media of each kind that have no placeholder yet; it is counted down.
    """

    def mark(match: re.Match[str]) -> str:
        kind = match[1]
        if left.get(kind, 0) <= 0:
            return hidden(match[0])
        left[kind] -= 1
        return match[0]

    return PLACEHOLDER.sub(mark, text)


def literal_tags(texts: list[tuple[str, str]], media: Mapping[str, int]) -> list[str]:
    """The contents of (role, content) pairs with as many placeholders as there are media; further tags are text.

    What the assistant says gets a placeholder only where the others' turns have too few.
    """
    left, contents = dict(media), [content for _, content in texts]
    for is_answer in (False, True):
        for number, (role, content) in enumerate(texts):
            if (role == "assistant") == is_answer and "<" in content:
                contents[number] = take_marks(content, left)
    return contents
