"""Options of benches: numbers within bounds, and a folder on the disk that is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.config.layers.keys import outside, shown_value
from zoo.errors import UserError, file_error
from zoo.files import expanded


class Bounded:
    """Options, a dataclass with numbers as `zoo.config.layers.keys.number` has them: UserError where one is out of bounds."""

    def __post_init__(self) -> None:
        for name, value, bounds in outside(self):
            raise UserError(f"{name}={shown_value(value)}: wanted a whole number {bounds}")


@contextmanager
def scratch(folder: str) -> Iterator[Path]:
    """A new folder within `folder`, which is made where there is none; removed at the end.

    Raises:
        UserError: it can't be made; names `folder`.
    """
    place = expanded(folder).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".zoo-bench-", dir=place)
    except OSError as error:
        error.filename = f"folder={folder}"
        raise file_error(error) or error from None
    with made as name:
        yield Path(name)
