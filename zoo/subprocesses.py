"""zoo's modules as processes of their own.

`python -m` alone looks in the current folder first. There, a clone's `zoo/` would hide the installed zoo, and a file of the user's
that is called `json.py` the standard library. So these processes look there last, for the user's own modules.
"""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this Python, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def find_users_modules() -> None:
    """Have modules imported from the current folder, too, behind everything that is installed."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
