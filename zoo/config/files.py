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

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zoo.config.reference import nearest
from zoo.errors import ConfigError

# What reading YAML may raise: tags such as `!!int` are given any text, and raise what int() raises.
_UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, RecursionError,
)  # fmt: skip
_TEXT_MB = 1  # MiB of a file
_COUNTED = re.compile(r"(?:(\d+)x)?(\d+)x(\w+)")
_REFERENCE = re.compile(r"(\\?)\$\{([^{}]*)\}?")
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
    if not path.is_absolute() and beside is not None and (beside / path).is_file():
        path = beside / path
    if not path.is_file():
        hint = nearest(path.stem, recipe_names())
        raise ConfigError(
            f"recipe={name_or_path}: no such file; recipes by name: {', '.join(hint) or 'zoo list'}"
        )
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
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except _UNREADABLE as error:
        raise ConfigError(f"{key}={text}: the value is no valid YAML ({_problem(error)}); quote it") from None
    assert isinstance(parsed, dict)
    return _filled(parsed["value"], key, "")


def _names(folder: Traversable) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def _as_path(name: str) -> Path | None:
    """`name` as a path when it is written like one: a YAML suffix, or a folder in it."""
    looks_so = name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name
    return Path(name).expanduser() if looks_so else None


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
    if not path.is_file():
        raise ConfigError(f"{kind}={name}: no such file; names that are known: {', '.join(known)}")
    return _read(path)


def _read(file: Traversable) -> Layer:
    """The file's keys as plain dicts; raises ConfigError with file and line where it is no YAML mapping."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(_TEXT_MB * 2**20 + 1)
        if len(raw) > _TEXT_MB * 2**20:
            raise ConfigError(f"{file}: over {_TEXT_MB} MiB, which is no recipe")
        parsed = OmegaConf.create(raw.decode("utf-8"))  # which bounds what aliases stand for
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        raise ConfigError(f"{where}: no valid YAML: {_problem(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: no text in UTF-8, so no YAML") from None
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(f"{file}: {_problem(error)}") from None
    if not isinstance(parsed, DictConfig):
        raise ConfigError(f"{file}: wanted keys and values (`train:` and so on), found a list")
    tree = OmegaConf.to_container(parsed, resolve=False)
    assert isinstance(tree, dict)
    return Layer(str(file), {str(key): _filled(value, str(key), f"{file}: ") for key, value in tree.items()})


def escaped(value: Any) -> Any:
    """A value in which no text is taken for a reference."""
    return _texts(value, lambda text: text.replace("${", r"\${"))


def _filled(value: Any, key: str, where: str) -> Any:
    """A value with the environment's in the place of `${oc.env:NAME}`; other references are refused."""

    def fill(match: re.Match[str]) -> str:
        escape, reference = match.groups()
        variable = _VARIABLE.fullmatch(reference)
        if escape:
            return match[0]
        if variable is None:
            raise ConfigError(
                f"{where}{key}: {match[0]}: no such reference; ${{oc.env:NAME}} is an environment variable, "
                r"\${ a dollar and a brace"
            )
        found = os.environ.get(variable[1], variable[2])
        if found is None:
            raise ConfigError(
                f"{where}{key}: the environment variable {variable[1]} is not set; set it, or give a value for "
                f"that case: ${{oc.env:{variable[1]},VALUE}}"
            )
        return found.replace("${", r"\${")

    return _texts(value, lambda text: _REFERENCE.sub(fill, text))


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    return value


def _problem(error: Exception) -> str:
    """What a parser had to say, on one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return getattr(error, "problem", None) or lines[0]
