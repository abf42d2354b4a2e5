"""Errors that the user can fix: shown as one sentence, without a traceback, with exit code 2.

Raise a subclass of :class:`UserError` where the cause is something a person typed, a file they gave, or what the machine
has to give. The message names the thing, the value seen, the value wanted and the next step.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# What the system says of a file system that is gone, by its name in `errno`: not every system has all of them.
LOST = [
    "EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ENODEV", "ENXIO",
    "ESHUTDOWN",
]  # fmt: skip

LONGEST = 1500  # characters of a message about a recipe, which may hold more than anybody wants to read
SEVERAL = 6000  # characters of one that tells several mistakes, a line each


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
    escapes = (
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    return _short("".join(escapes), most)


def printable_lines(text: str) -> str:
    """The text with its line breaks and tabs, and all else that can't be printed escaped: somebody's words for a terminal."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _short(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]}...{text[3 + most * 2 // 3 - most :]}"


def file_error(error: OSError, path: str | Path | None = None, hint: str = "") -> UserError | None:
    """What the operating system refuses about a file, as a mistake that the user can fix.

    Args:
        path: the file or folder, where the error names none. With neither there is nothing to say: None.
        hint: what else would help where there is no space.
    """
    name = error.filename if error.filename is not None else path
    if name is None:
        return None
    code = errno.errorcode.get(error.errno or 0, "")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{name}: no such file or folder")
    if isinstance(error, PermissionError):
        return UserError(f"{name}: no permission")
    if code in ("ENOSPC", "EDQUOT", "EFBIG"):
        return UserError(f"{name}: can't be written: {_no_space(code, Path(os.fsdecode(name)))}{hint}")
    if code == "EROFS":
        return UserError(f"{name}: can't be written: its file system is read-only; give a place that can be written to")
    if code in LOST:
        return UserError(
            f"{name}: its file system does not answer ({error.strerror}): the disk or its server is lost; what was "
            f"written whole is still good once it is back"
        )
    if code in ("EMFILE", "ENFILE"):
        return UserError(
            f"{name}: can't be opened: this process may have {_limit('RLIMIT_NOFILE')} files open (ulimit -n); raise that"
        )
    return UserError(f"{name}: {error.strerror}")


def _no_space(code: str, path: Path) -> str:
    if code == "EFBIG":
        return f"files may have {_limit('RLIMIT_FSIZE')} bytes here (ulimit -f); raise that"
    reason = "the quota is used up" if code == "EDQUOT" else "no space left on the disk"
    free_total = disk(path)
    if free_total is None:
        return f"{reason}; free some, or give a place on another disk"
    free, total, nodes = free_total
    if code == "ENOSPC" and not nodes:
        return "no more files fit on the disk (its inodes are used up); delete some, or give a place on another disk"
    return f"{reason} ({size(free)} of {size(total)} are free); free some, or give a place on another disk"


def disk(path: Path) -> tuple[int, int, bool] | None:
    """(bytes free, bytes in all, whether more files fit) of the disk that a file lies on or would; None if it is lost."""
    for folder in (path, *path.absolute().parents):
        try:
            stats = os.statvfs(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return (
            stats.f_bavail * stats.f_frsize,
            stats.f_blocks * stats.f_frsize,
            stats.f_favail > 0 or not stats.f_files,
        )
    return None


def size(number: float) -> str:
    """Bytes as a person reads them: `1.5 GB`."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= step:
            return f"{number / step:.1f} {unit}"
    return f"{number:.0f} B"


def part_of(part: float, whole: float) -> str:
    """Bytes of so many: `12 of 30 GB`."""
    number, unit = size(whole).split()
    scale = whole / float(number) if float(number) else 1.0
    return f"{part / scale:.3g} of {number} {unit}"


def _limit(name: str) -> str:
    import resource

    return f"{resource.getrlimit(getattr(resource, name))[0]:,}"


class ConfigError(UserError):
    """A recipe, an override or a combination of keys that cannot run; its message has at most about LONGEST characters, or SEVERAL of some lines."""

    def __init__(self, message: str) -> None:
        most = SEVERAL if "\n" in message else LONGEST
        super().__init__("\n".join(printable(line) for line in _short(message, most).split("\n")))
