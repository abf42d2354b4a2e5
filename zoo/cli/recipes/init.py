"""
usage: zoo init [data=FILE] [model=FOLDER] [tune=all] [out=my_recipe.yaml] [force=true]

Writes a recipe for your data and model: a short YAML file with what was found beside each line, which
`zoo train recipe=my_recipe.yaml` takes as it is. What is not given is asked on a terminal; elsewhere it has its default.

  data=FILE    rows to train on: a file or a folder, a data set of the hub, or digits. The first 200 rows are looked at:
               their form, media and lengths, and which of them can't be used
  model=NAME   what to start from: a Hugging Face folder, a hub id, a zoo run, a recipe's name; default: tiny, a small model
               with random weights
  tune=KIND    all (the model's own weights) or adapters (LoRA); default: all where that fits this machine
  out=FILE     the file; default: my_recipe.yaml
  force=true   replace a file that is there
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zoo.cli.arguments import split_flags, split_values
from zoo.errors import UserError
from zoo.files import expanded, write_atomically

KEYS = ("data", "model", "tune", "out", "force")
_OUT = "my_recipe.yaml"
_TUNE = ("all", "adapters")


def run(arguments: Sequence[str]) -> int:
    """Ask what is not given, write the recipe and say how it is used."""
    _, rest = split_flags(arguments, ())
    _, values = split_values(rest, KEYS, "zoo init [data=FILE] [model=FOLDER] [out=my_recipe.yaml]", ())
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if not interactive and "data" not in values:
        raise UserError("zoo init: no terminal to ask on; give data=FILE, and model=FOLDER for weights of yours")
    if (force := values.get("force", "false")) not in ("true", "false"):
        raise UserError(f"force={force}: wanted true or false")

    def wanted[T](key: str, question: str, default: str, look: Callable[[str], T]) -> T:
        if key in values or not interactive:
            return look(values.get(key, default))
        return _asked(question, default, look)

    def free(text: str) -> Path:
        return _free(text, force == "true")

    if "out" in values or not interactive:
        free(values.get("out", _OUT))  # before the seconds that data and model take
    from zoo.tools.new_recipe import draft, look_at_data, look_at_model, prefers_adapters

    data = wanted("data", "rows to train on: a file, a folder, a hub id", "digits", look_at_data)
    print(f"data: {data}")
    for error in data.bad[:3]:
        print(f"  can't be used: {error}")
    question = "model to start from: a folder, a hub id, a run; tiny has random weights"
    model = wanted("model", question, "tiny", lambda text: look_at_model(text, data))
    print(f"model: {model.description}; recipe {model.recipe}")
    adapters = False
    if model.adapters is not None:
        default = _TUNE[prefers_adapters(model)]
        adapters = wanted("tune", "train all weights, or adapters", default, _tune) == "adapters"
    elif "tune" in values and _tune(values["tune"]) == "adapters":
        raise UserError("tune=adapters: adapters are for weights that know something; name some with model=")
    out = wanted("out", "file to write", _OUT, free)
    write_atomically(out, draft(data, model, adapters, out))
    print(f"wrote {out}; zoo train recipe={out}")
    return 0


def _asked[T](question: str, default: str, look: Callable[[str], T]) -> T:
    """The answer to a question, asked again until it is a right one."""
    while True:
        try:
            text = input(f"{question} [{default}]: ").strip()
        except EOFError:
            raise UserError("zoo init: the input has ended; nothing was written") from None
        try:
            return look(text or default)
        except UserError as error:
            print(f"  {error}")


def _free(text: str, force: bool) -> Path:
    """The path of a YAML file that may be written."""
    path = expanded(text)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"out={text}: wanted a file whose name ends in .yaml")
    if path.exists() and not (force and path.is_file()):
        raise UserError(f"out={text}: it is there already; give another name, or force=true to replace it")
    if not path.parent.is_dir():
        raise UserError(f"out={text}: no folder {path.parent}")
    return path


def _tune(text: str) -> str:
    if text not in _TUNE:
        raise UserError(f"tune={text}: wanted {' or '.join(_TUNE)}")
    return text
