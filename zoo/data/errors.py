"""`RowError`: one row of the data that can't be used, with where it stands and a short slug of the cause."""

from __future__ import annotations

from zoo.errors import UserError, printable

LONGEST = 1000  # characters of a message; rows may hold more than anybody wants to read


class RowError(UserError):
    """A bad row; `data.on_error` decides whether it stops the run or is counted and listed.

    Attributes:
        source: where the row stands, as "train.jsonl:17"; empty where only a media file is known.
        cause: a short slug to count by, such as "missing_file", "corrupt_media" or "overlong".
        message: what was seen, what was wanted and what to do, without the source.

    Source and message are one printable line each, of at most LONGEST characters, whatever the row holds.
    """

    def __init__(self, source: str, cause: str, message: str) -> None:
        source, message = printable(source, LONGEST), printable(message, LONGEST)
        super().__init__(source, cause, message)
        self.source = source
        self.cause = cause
        self.message = message

    def __str__(self) -> str:
        return f"{self.source}: {self.message}" if self.source else self.message

    def at(self, source: str) -> RowError:
        """The same error, of the row at `source`."""
        return RowError(source, self.cause, self.message)

    def bare(self) -> RowError:
        """The same error without its traceback, which would keep the row's media in memory."""
        return RowError(*self.args)


def bad_row(message: str, cause: str = "bad_row") -> RowError:
    """The error of a row whose place the caller adds (`RowError.at`)."""
    return RowError("", cause, message)


def corrupt_media(source: object, kind: str, reason: str) -> RowError:
    """The error of a medium that can't be used: `kind` it should be, where it stands, and why."""
    return RowError("", "corrupt_media", f"{kind} {source} can't be used: {reason}.")


class NoSoundTrackError(RowError):
    """A file, or a list of frames, has no audio track."""


def raised(error: RowError) -> RowError:
    """A bad row's error as data.on_error=raise has it."""
    text = f"{error.message} (data.on_error=skip leaves out and lists such rows.)"
    return RowError(error.source, error.cause, text)
