"""Callbacks of a caller on their way to rank 0, which is a child process: pickled by dill, classes of a script or notebook too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zoo.errors import UserError, printable
from zoo.user_code import calling


def copied(callbacks: Sequence[object]) -> bytes:
    """The callbacks as bytes. What `__main__` defines goes with them; other modules are imported by rank 0.

    Raises:
        UserError: one can't be pickled.
    """
    import dill

    for callback in callbacks:
        try:
            dill.dumps(callback, recurse=True)
        except Exception as error:  # whatever its parts raise
            reason = printable(f"{type(error).__name__}: {error}", 300)
            raise UserError(
                f"callbacks: a {type(callback).__name__} can't be copied to the process of rank 0 ({reason}); make what can't be "
                "pickled (connections, generators) in on_start, or name the class in run.callbacks=[module:Class]"
            ) from error
    data: bytes = dill.dumps(list(callbacks), recurse=True)
    return data


def read_copies(path: str | Path) -> list[object]:
    """The callbacks that `copied` wrote.

    Raises:
        UserError: a module that defines one can't be imported here.
    """
    import dill

    try:
        with calling("callbacks"):
            copies: list[object] = dill.loads(Path(path).read_bytes())
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"callbacks: they can't be made again in the process of rank 0 ({reason}); put their module where Python finds "
            "it (PYTHONPATH, or the folder that the program is started in)"
        ) from error
    return copies
