"""Formats of users: a function of a module or file (`format: my_module:function`), or one that a package announces.

A package announces formats by entry points of the group `zoo.formats` (name -> `module:function`). A module is looked for in
the folder that zoo was started in, too; `folder/my_file.py:function` names a file. The function takes a row as its file has it, and returns it in zoo's own form or in
any form that is found by its keys.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from zoo.data.errors import RowError
from zoo.errors import UserError, printable
from zoo.files import expanded

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
        function = _imported(name)
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
        function = announced[name].load()
    if not callable(function):
        raise UserError(f"format={printable(name, 100)}: it is no function; one of a row is wanted")

    def convert(item: dict[str, Any], source: str) -> dict[str, Any]:
        try:
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


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    folder = str(Path.cwd())
    there = folder in sys.path
    if not there:  # a command such as `zoo` does not look there by itself
        sys.path.insert(0, folder)
    try:
        found: Any = _of_file(module) if module.endswith(".py") else importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except Exception as error:  # of the user's module, whatever it raises
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"format={printable(name, 100)}: it can't be imported from {folder} or from an installed package ({reason})"
        ) from error
    finally:
        if not there and folder in sys.path:
            sys.path.remove(folder)
    return found


def _of_file(name: str) -> Any:
    """The module that a file holds, under a name that is no other module's."""
    path = expanded(name)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"zoo_format_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
