"""
usage: zoo show recipe=NAME [key=value ...] [--json]
       zoo show RUN [--json]
       zoo show --schema [--json]

RUN is a run folder: prints how the run is, while it runs or afterwards: state, step, speed, time to go, loss, last save
and the health of its ranks.

With a recipe it prints the recipe that `zoo train` would resolve from the same arguments, as YAML with what each key means, headed by
what your file and overrides change and by what differs from the defaults of the schema. --schema prints every key with
its type, default and meaning. --json prints the same for machines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.cli.arguments import split_flags, split_recipe
from zoo.errors import UserError

_COLUMN = 44  # where the meanings of keys begin


def run(arguments: Sequence[str]) -> int:
    """Print a resolved recipe, a run's state, or the schema."""
    flags, rest = split_flags(arguments, ("--schema", "--json"))
    if "--schema" in flags:
        if rest:
            raise UserError(f"{rest[0]}: zoo show --schema takes --json and nothing else")
        print(json.dumps(_schema_entries(), indent=2) if "--json" in flags else _schema())
        return 0
    if len(rest) == 1 and ("=" not in rest[0] or Path(rest[0]).is_dir()) and _may_be_a_folder(rest[0]):
        from zoo.tools.runs.status import describe, read_status

        status = read_status(rest[0])
        print(json.dumps(status.to_json(), indent=2) if "--json" in flags else describe(status))
        return 0
    name, overrides = split_recipe(rest, "zoo show recipe=NAME")

    from zoo.config.compose import resolve
    from zoo.config.derived import random_base

    resolved = resolve(name, overrides)
    values = asdict(resolved.recipe)
    if "--json" in flags:
        found = {
            "recipe": values,
            "size_why": resolved.size_why,
            "taken": resolved.taken,
            "changed": _changed(values, asdict(resolved.base)),
            "differs_from_defaults": _differing(values),
        }
        print(json.dumps(found, indent=2))
        return 0
    print(f"# size {resolved.recipe.size or '-'}: {resolved.size_why}")
    for line in filter(None, (resolved.taken, random_base(resolved.recipe))):
        print(f"# {line}")
    print("\n".join([*_changes(values, asdict(resolved.base), resolved.base_name), *_differences(values)]))
    print(_documented(values))
    return 0


def _may_be_a_folder(text: str) -> bool:
    """Whether a lone argument is meant as a run folder, and not as a recipe's name that lacks its `recipe=`."""
    from zoo.config.recipes.matrix import recipe_names

    return Path(text).is_dir() or not (text in recipe_names() or text.endswith((".yaml", ".yml")))


def _schema_entries() -> list[dict[str, Any]]:
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    return [
        {
            **{name: value for name, value in entry._asdict().items() if name != "off"},
            "bounds": None if entry.bounds is None else asdict(entry.bounds),
            "choices": entry.choices or None,
            "when": entry.needs or None,
        }
        for entry in keys(Recipe).values()
    ]


def _schema() -> str:
    from zoo.config.layers.keys import keys, show_value
    from zoo.config.schema import Recipe

    lines = []
    for entry in keys(Recipe).values():
        kind = entry.type.replace(" | None", " or null")
        lines.append(f"{entry.key:<22} {kind:<16} {show_value(entry.default):<20} {entry.doc}")
        if not all(choice in entry.doc for choice in entry.choices):
            lines.append(f"{'':<22} one of: {', '.join(entry.choices)}")
        if entry.bounds is not None:
            lines.append(f"{'':<22} {entry.bounds}")
        if entry.needs:
            lines.append(f"{'':<22} {entry.needs}")
    return "\n".join([f"{'key':<22} {'type':<16} {'default':<20} meaning", *lines])


def _get(values: dict[str, Any], key: str) -> Any:
    value: Any = values
    for name in key.split("."):
        value = value[name]
    return value


def _changed(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Key -> its value and that of the base, where they differ; the architecture key by key."""
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    found: dict[str, Any] = {}
    for entry in keys(Recipe).values():
        if entry.key == "recipe":
            continue
        new, old = _get(values, entry.key), _get(base, entry.key)
        if isinstance(new, dict) and isinstance(old, dict):
            found.update(_changed_within(new, old, f"{entry.key}."))
        elif new != old:
            found[entry.key] = {"value": new, "base": old}
    return found


def _changed_within(new: dict[str, Any], old: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in {**old, **new}:
        one, other = new.get(name), old.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found.update(_changed_within(one, other, f"{prefix}{name}."))
        elif one != other:
            found[f"{prefix}{name}"] = {"value": one, "base": other}
    return found


def _differing(values: dict[str, Any]) -> dict[str, Any]:
    """Key -> its value and the schema's default, where they differ."""
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    return {
        entry.key: {"value": value, "default": entry.default}
        for entry in keys(Recipe).values()
        if (value := _get(values, entry.key)) != entry.default and entry.key != "model.arch"
    }


def _changes(values: dict[str, Any], base: dict[str, Any], name: str) -> list[str]:
    """Comment lines with the keys whose value is not that of the recipe with its overlays alone."""
    from zoo.config.layers.keys import show_value

    changed = _changed(values, base)
    if not changed:
        return []
    lines = [f"# changed against {name}:"]
    for key, pair in changed.items():
        lines.append(f"#   {key}: {show_value(pair['value'])} (was {show_value(pair['base'])})")
    return lines


def _differences(values: dict[str, Any]) -> list[str]:
    """Comment lines with the keys whose value is not the schema's default."""
    from zoo.config.layers.keys import show_value

    lines = ["# differs from the defaults:"]
    for key, pair in _differing(values).items():
        lines.append(f"#   {key}: {show_value(pair['value'])} (default {show_value(pair['default'])})")
    return lines


def _documented(values: dict[str, Any]) -> str:
    """The recipe as YAML, each key followed by its meaning."""
    from omegaconf import OmegaConf

    from zoo.config.layers.keys import keys
    from zoo.config.layers.layer import escaped
    from zoo.config.schema import Recipe

    lines, path = [], [""]
    for line in OmegaConf.to_yaml(OmegaConf.create(escaped(values))).splitlines():
        match = re.match(r"( *)(\w+):", line)
        if match:
            depth = len(match[1]) // 2
            path = [*path[:depth], match[2]]
            entry = keys(Recipe).get(".".join(path))
            if entry is not None:
                line = f"{line:<{_COLUMN}} # {entry.doc}"
        lines.append(line)
    return "\n".join(lines)
