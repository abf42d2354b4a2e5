"""Formats of users: a function of a module or file (`format: my_module:function`), or one that a package announces.

A package announces formats by entry points of the group `zoo.formats` (name -> `module:function`). A module is looked for in
the folder that zoo was started in, too; `folder/my_file.py:function` names a file. The function takes a row as its file has it, and returns it in zoo's own form or in
any form that is found by its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from zoo.data.errors import RowError
from zoo.errors import UserError, printable
from zoo.registry import imported
from zoo.user_code import calling

GROUP = "zoo.formats"


@cache
def find_format(name: str, known: tuple[str, ...]) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """The format that a user's function makes.

    Args:
        name: `module:function`, `file.py:function`, or the name of an entry point.
        known: the names of zoo's own formats, for messages.

    Raises:
        UserError: no such function.
    """
    if ":" in name:
        function = imported(name, "format")
    else:
        announced = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in announced:
            there = [*known, *announced]
            near = get_close_matches(name, there, n=1, cutoff=0.4)
            hint = f"nearest: {near[0]}; " if near else ""
            raise UserError(
                f"format={printable(name, 100)}: no such format; {hint}there are {', '.join(there)}, and module:function "
                "for one of your own"
            )
        with calling(f"format={name}"):
            function = announced[name].load()
    if not callable(function):
        raise UserError(f"format={printable(name, 100)}: it is no function; one of a row is wanted")

    def convert(item: dict[str, Any], source: str) -> dict[str, Any]:
        try:
            with calling(f"format={name}"):
                made = function(item)
        except RowError as error:
            raise error.at(source) from error
        except Exception as error:  # whatever the function raises is about this row
            text = f"format {name} refuses the row: {type(error).__name__}: {error}."
            raise RowError(source, "bad_row", text) from error
        if not isinstance(made, Mapping):
            text = f"format {name} returned a {type(made).__name__}; a dict is wanted."
            raise RowError(source, "bad_row", text)
        return {str(key): value for key, value in made.items()}

    return convert
