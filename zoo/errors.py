"""Errors that are the user's to mend: shown as one sentence, without a traceback, with exit code 2.

Raise a subclass of :class:`UserError` where the cause is something a person typed or a file they gave.
The message names the thing, the value seen, the value wanted and the next step.
"""

from __future__ import annotations

LONGEST = 1500  # characters of a message about a recipe, which may hold more than anybody wants to read


class UserError(ValueError):
    """A mistake in what the user gave; the command line prints its message and exits with 2."""


def printable(text: str, most: int | None = None) -> str:
    """The text on one line: what can't be printed (control codes, halves of surrogate pairs, odd bytes of file names) is escaped.

    Args:
        text: anything, of any length.
        most: longest result, in characters; of a longer one the beginning and the end are kept.
    """
    text = _short(text, most)
    if text.isprintable():
        return text
    escapes = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return _short("".join(escapes), most)


def _short(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]}...{text[3 + most * 2 // 3 - most :]}"


def file_error(error: OSError) -> UserError | None:
    """What the operating system refuses about a file, as a mistake to mend; None where it names no file."""
    if error.filename is None:
        return None
    reasons = {FileNotFoundError: "no such file or folder", PermissionError: "no permission"}
    return UserError(f"{error.filename}: {reasons.get(type(error), error.strerror)}")


class ConfigError(UserError):
    """A recipe, an override or a combination of keys that cannot run; its message has at most about LONGEST characters."""

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line) for line in _short(message, LONGEST).split("\n")))
