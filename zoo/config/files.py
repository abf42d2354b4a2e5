"""Where recipes and their overlays lie, and how a YAML file is read.

`recipes/<name>.yaml` are recipes, `recipes/sizes/<family>/<size>.yaml` and `recipes/hardware/<name>.yaml`
overlays of the same form. A path to a file of the user's own is taken wherever a name is.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Layer:
    """What one file or the command line sets: nested keys, and where they were written."""

    origin: str  # path of the file; empty for the command line
    tree: dict[str, Any]


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
    """The hardware overlay `name`, or the user's own file when it is a path."""
    return _read_overlay("hardware", name, hardware_names(), files("zoo.recipes") / "hardware")


def parse_value(key: str, text: str) -> Any:
    """The value of an override's text, read as YAML: ``2``, ``1e-4``, ``[a, b]``, ``null``."""
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{key}={text}: the value is no valid YAML ({_problem(error)}); quote it") from None
    assert isinstance(parsed, dict)
    return parsed["value"]


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
    near = nearest(name, known)
    hint = f"nearest: {', '.join(near)}" if near else "`zoo list` shows them"
    return f"no such {kind}; {hint}"


def _read_overlay(kind: str, name: str, known: list[str], folder: Traversable) -> Layer:
    path = _as_path(name)
    if path is None:
        if name not in known:
            raise ConfigError(f"{kind}={name}: {_unknown(kind, name, known)}")
        return _read(folder / f"{name}.yaml")
    if not path.is_file():
        raise ConfigError(f"{kind}={name}: no such file; names that are known: {', '.join(known)}")
    return _read(path)


def _read(file: Traversable) -> Layer:
    """The file's keys as plain dicts; raises ConfigError with file and line where it is no YAML mapping."""
    try:
        parsed = OmegaConf.create(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        raise ConfigError(f"{where}: no valid YAML: {_problem(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_problem(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: no text in UTF-8, so no YAML") from None
    if not isinstance(parsed, DictConfig):
        raise ConfigError(f"{file}: wanted keys and values (`train:` and so on), found a list")
    tree = OmegaConf.to_container(parsed, resolve=False)
    assert isinstance(tree, dict)
    return Layer(str(file), {str(key): value for key, value in tree.items()})


def _problem(error: Exception) -> str:
    """What a parser had to say, on one line."""
    return getattr(error, "problem", None) or str(error).splitlines()[0]
