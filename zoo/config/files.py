"""Where recipes and their overlays lie, and how a YAML file is read.

`recipes/<name>.yaml` are recipes, `recipes/sizes/<family>/<size>.yaml` and `recipes/hardware/<kind>.yaml`
overlays of the same form; of a kind of GPU there may be several, as in 8xh200 or, on two nodes, 2x8xh200. A path to a
file of the user's own is taken wherever a name is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zoo.config.reader import MOST_TEXT, UnreadableError, as_text, read_text, read_yaml
from zoo.config.reference import nearest
from zoo.errors import ConfigError, printable
from zoo.files import expanded

_COUNTED = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x(\w+)", re.ASCII)
_REFERENCE = re.compile(r"(\\*)\$\{([^{}]*)\}?")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}(?:\[\d+\][\w.]*)?", re.ASCII)
_DOLLAR = re.compile(r"(\\*)\$\{")
_VARIABLE = re.compile(r"oc\.env:([A-Za-z_]\w*)(?:,(.*))?")


@dataclass(frozen=True)
class Edit:
    """One entry of a list that is set, or a key of it: data.train[0].weight=2."""

    key: str  # the list
    index: int
    rest: tuple[str, ...]  # keys within the entry
    value: Any


@dataclass(frozen=True)
class Layer:
    """What one file or the command line sets: nested keys, and where they were written."""

    origin: str  # path of the file; empty for the command line
    tree: dict[str, Any]
    edits: tuple[Edit, ...] = ()  # of lists, after the tree


def recipe_names() -> list[str]:
    """Names of the recipes that come with zoo."""
    return _names(files("zoo.recipes"))


def size_names(family: str) -> list[str]:
    """Sizes of `family`; empty when there are none."""
    return _names(files("zoo.recipes") / "sizes" / family)


def hardware_names() -> list[str]:
    """Names of the hardware overlays."""
    return _names(files("zoo.recipes") / "hardware")


def read_recipe(name_or_path: str, beside: Path | None = None) -> Layer:
    """The recipe file of that name or path; `beside` is a folder that a relative path may start from."""
    path = _as_path(name_or_path)
    if path is None:
        names = recipe_names()
        if name_or_path not in names:
            raise ConfigError(f"recipe={name_or_path}: {_unknown('recipe', name_or_path, names)}")
        return _read(files("zoo.recipes") / f"{name_or_path}.yaml")
    if not path.is_absolute() and beside is not None and (beside / path).exists():
        path = beside / path
    if not path.exists():
        hint = nearest(path.stem, recipe_names())
        raise ConfigError(
            f"recipe={name_or_path}: no such file; recipes by name: {', '.join(hint) or 'zoo list'}"
        )
    if path.is_dir():
        inside = " (a run's recipe is its config.yaml)" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"recipe={name_or_path}: a folder; wanted a YAML file{inside}")
    return _read(path)


def read_size(family: str, size: str) -> Layer:
    """The overlay of `size` for `family`, or the user's own file when `size` is a path."""
    return _read_overlay("size", size, size_names(family), files("zoo.recipes") / "sizes" / family)


def read_hardware(name: str) -> Layer:
    """The overlay of so many GPUs of a kind ("8xh200", "2x8xh100"), of a kind ("cpu"), or of the user's own file.

    Its `machine.gpus` and `machine.nodes` are those of the name.
    """
    counted = _COUNTED.fullmatch(name)
    nodes, gpus, kind = counted.groups() if counted else (None, None, name)
    layer = _read_overlay("hardware", kind, hardware_names(), files("zoo.recipes") / "hardware", given=name)
    machine = dict(layer.tree.get("machine") or {})
    if gpus is None:
        return layer
    if "memory_gb" not in machine:
        raise ConfigError(f"hardware={name}: {kind} is no GPU to have several of; write hardware={kind}")
    if not int(gpus) or not int(nodes or 1):
        raise ConfigError(f"hardware={name}: wanted at least one of them")
    machine |= {"gpus": int(gpus), "nodes": int(nodes or 1)}
    return Layer(layer.origin, {**layer.tree, "machine": machine})


def parse_value(key: str, text: str) -> Any:
    """The value of an override's text, read as YAML: ``2``, ``1e-4``, ``[a, b]``, ``null``."""
    try:
        parsed = read_yaml(text)
    except UnreadableError as error:
        shown = printable(text, 200)
        raise ConfigError(f"{key}={shown}: the value is no valid YAML ({error}); quote it") from None
    return _filled(parsed, key, "")


def _names(folder: Traversable) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def _as_path(name: str) -> Path | None:
    """`name` as a path when it is written like one: a YAML suffix, or a folder in it."""
    looks_so = name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name
    return expanded(name) if looks_so else None


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = nearest(name[:100], known)
    hint = f"nearest: {', '.join(near)}" if near else "`zoo list` shows them"
    return f"no such {kind}; {hint}"


def _read_overlay(kind: str, name: str, known: list[str], folder: Traversable, given: str = "") -> Layer:
    path = _as_path(name)
    if path is None:
        if name not in known:
            raise ConfigError(f"{kind}={given or name}: {_unknown(kind, name, known)}")
        return _read(folder / f"{name}.yaml")
    if not path.exists() or path.is_dir():
        raise ConfigError(f"{kind}={name}: no such file; names that are known: {', '.join(known)}")
    return _read(path)


def _read(file: Traversable) -> Layer:
    """The file's keys as plain dicts; raises ConfigError with file and line where it is no YAML mapping."""
    try:
        parsed = read_yaml(read_text(file) if isinstance(file, Path) else as_text(file.read_bytes()))
    except UnreadableError as error:
        where = f"{file}:{error.line}: no valid YAML" if error.line else str(file)
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(parsed, dict | None):
        kind = "a list" if isinstance(parsed, list) else "one value"
        raise ConfigError(f"{file}: wanted keys and values (`train:` and so on), found {kind}")
    found = parsed or {}
    odd = [key for key in found if not isinstance(key, str) or not _NAME.fullmatch(key)]
    if odd:  # and its text may be anybody's
        raise ConfigError(f"{file}: {len(odd)} of its {len(found)} keys can be none of a recipe; is it one?")
    return Layer(str(file), {key: _filled(value, key, f"{file}: ") for key, value in found.items()})


def escaped(value: Any) -> Any:
    """A value in which no text is taken for a reference."""
    return _texts(value, _escaped)


def _escaped(text: str) -> str:
    return _DOLLAR.sub(r"\1\1\\${", text)  # backslashes before it are escapes, too


def _filled(value: Any, key: str, where: str) -> Any:
    """A value with the environment's in the place of `${oc.env:NAME}`; other references are refused."""

    left = MOST_TEXT

    def fill(match: re.Match[str]) -> str:
        nonlocal left
        slashes, reference = match.groups()
        kept = slashes[: len(slashes) // 2]
        if len(slashes) % 2:
            return kept + match[0][len(slashes) :]
        variable = _VARIABLE.fullmatch(reference)
        if variable is None:
            raise ConfigError(
                f"{where}{key}: {printable(match[0], 100)}: no such reference; ${{oc.env:NAME}} is an environment "
                r"variable, \${ a dollar and a brace"
            )
        found = os.environ.get(variable[1], variable[2])
        if found is None:
            raise ConfigError(
                f"{where}{key}: the environment variable {variable[1]} is not set; set it, or give a value for "
                f"that case: ${{oc.env:{variable[1]},VALUE}}"
            )
        left -= len(found)
        if left < 0:
            raise ConfigError(f"{where}{key}: over {MOST_TEXT:,} characters with its environment variables")
        return kept + found

    return _texts(value, lambda text: _escaped(_REFERENCE.sub(fill, text)))


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    return value
