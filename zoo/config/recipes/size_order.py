"""The order of sizes: by parameters, as their names say them. Imports nothing, as completion waits for it."""

from __future__ import annotations

import re

_COUNT = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([mbt])(?![a-z])")  # not the a3b of 30b-a3b
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


def size_order(name: str) -> tuple[float, str]:
    """A key to sort sizes by: their parameters, then their name. One that names no number (tiny) comes first."""
    count = _COUNT.search(name)
    return (float(count[1]) * _UNITS[count[2]] if count else 0.0), name
