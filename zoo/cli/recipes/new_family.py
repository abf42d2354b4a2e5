"""
usage: zoo new-family NAME [--package] [--vision] [out=FOLDER]

Lays out a model family: its config, its bridge, a recipe, and tests that compare it with transformers, which fail until it is
filled in and say what is missing. docs/add-a-family.md goes through it.

  NAME         what users will type as model.family
  --package    a package of your own in the new folder NAME, instead of the files within a checkout of zoo
  --vision     images and videos beside text, through a vision tower of transformers
  out=FOLDER   another folder for the package, or another checkout
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.cli.arguments import split_flags, split_values
from zoo.files import expanded

KEYS = ("out",)


def run(arguments: Sequence[str]) -> int:
    """Write the files, list them, and say what to run next."""
    flags, rest = split_flags(arguments, ("--package", "--vision"))
    (name,), values = split_values(rest, KEYS, "zoo new-family NAME [--package] [out=FOLDER]", ("NAME",))
    from zoo.tools.new_family import checkout, lay_out

    package = "--package" in flags
    root = expanded(values["out"]) if "out" in values else expanded(name) if package else checkout()
    for path in lay_out(name, root, package=package, vision="--vision" in flags):
        print(f"wrote {path}")
    test = f"tests/test_{name}.py" if package else f"tests/parity/test_{name}.py"
    first = f"pip install -e {root}; " if package else ""
    print(f'{first}fill in what `python -m pytest -m "" {root / test}` says; docs/add-a-family.md goes through it')
    return 0
