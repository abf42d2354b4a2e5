"""Calls of functions that users bring (callbacks, formats, scores): whatever they do ends as an error that names them.

`sys.exit()` in such a function is no end of a run, a process that it forks must not go on as a second rank, and a call that ends
the process at once (`os._exit`, a signal) has left its name in a file, for the launcher.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 512  # bytes of a name
_EXIT = 70  # of a forked process that user code has let return
_name = ""
_record: tuple[Path, mmap.mmap] | None = None


class UserCodeError(RuntimeError):
    """A user's function has tried to end the process."""


@contextmanager
def calling(name: str) -> Iterator[None]:
    """The block calls a user's function; `name` is how messages name it.

    Raises:
        UserCodeError: the function has raised SystemExit, or another exception that is none of `Exception`. KeyboardInterrupt passes.
    """
    process, outer = os.getpid(), _name
    _note(name)
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        code = f"({error.code!r})" if isinstance(error, SystemExit) else ""
        raise UserCodeError(f"it raised {type(error).__name__}{code}, which ends nothing here") from error
    finally:
        if os.getpid() != process:
            text = f"zoo: {name} has forked, and the forked process has returned from it: that one is ended\n"
            os.write(2, text.encode(errors="replace"))
            os._exit(_EXIT)
        _note(outer)


def called() -> str:
    """The user's function that is being called, by any thread; "" for none."""
    return _name


def record(path: Path) -> None:
    """From now on that file holds the name of the function that is being called, however this process ends."""
    global _record
    path.write_bytes(bytes(_LONGEST))
    with path.open("r+b") as file:
        _record = path, mmap.mmap(file.fileno(), _LONGEST)
    _note(_name)


def recorded(path: Path) -> str | None:
    """What the file of a process that has ended says; None where there is none, as the process came to its own end."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except FileNotFoundError:
        return None


def forget() -> None:
    """Remove the file: this process comes to its own end."""
    global _record
    if _record is not None:
        _record[0].unlink(missing_ok=True)
        _record = None


def _note(name: str) -> None:
    global _name
    _name = name
    if _record is not None:
        _record[1][:] = name.encode(errors="replace")[:_LONGEST].ljust(_LONGEST, b"\0")
