"""Errors that are the user's to mend: shown as one sentence, without a traceback, with exit code 2.

Raise a subclass of :class:`UserError` where the cause is something a person typed or a file they gave.
The message names the thing, the value seen, the value wanted and the next step.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave; the command line prints its message and exits with 2."""


def file_error(error: OSError) -> UserError | None:
    """What the operating system refuses about a file, as a mistake to mend; None where it names no file."""
    if error.filename is None:
        return None
    reasons = {FileNotFoundError: "no such file or folder", PermissionError: "no permission"}
    return UserError(f"{error.filename}: {reasons.get(type(error), error.strerror)}")


class ConfigError(UserError):
    """A recipe, an override or a combination of keys that cannot run."""
