"""Prints the lowest versions that pyproject.toml allows, as constraints of pip: `python scripts/lowest.py`."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lowest(requirement: str) -> str:
    """`name==X` for `name[extras]>=X,<Y`."""
    match = re.match(r"([\w-]+)(?:\[.*?\])?[>=]=([\w.]+)", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} has no lower bound")
    return "==".join(match.groups())


if __name__ == "__main__":
    print(*map(lowest, PROJECT["dependencies"]), sep="\n")
