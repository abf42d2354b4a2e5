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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_recipe
from zoo.errors import UserError
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from zoo.config.schema import Recipe

_COLUMN = 44  # where the meanings of keys begin


def run(arguments: Sequence[str]) -> int:
    """Print a resolved recipe, a run's state, or the schema."""
    flags, rest = split_flags(arguments, ("--schema", "--json"))
    if "--schema" in flags:
        if rest:
            raise UserError(f"{rest[0]}: zoo show --schema takes --json and nothing else")
        print(json.dumps(_schema_entries(), indent=2) if "--json" in flags else _schema())
        return 0
    from zoo.config.recipes.matrix import recipe_names

    ends = (".yaml", ".yml")
    is_recipe = any("=" in text or text in recipe_names() or text.endswith(ends) for text in rest)
    if len(rest) == 1 and (Path(rest[0]).is_dir() or not is_recipe):
        from zoo.tools.runs.status import describe, read_status

        status = read_status(rest[0])
        print(json.dumps(status.to_json(), indent=2) if "--json" in flags else describe(status))
        return 0
    name, overrides = split_recipe(rest, "zoo show recipe=NAME")

    from zoo.config.compose import resolve
    from zoo.config.derived import random_base

    resolved = resolve(name, overrides)
    values = asdict(resolved.recipe)
    changed, differing = _changed(values, asdict(resolved.base)), _differing(resolved.recipe)
    if "--json" in flags:
        shown = {
            "recipe": values, "size_why": resolved.size_why, "taken": resolved.taken, "changed": changed,
            "differs_from_defaults": differing,
        }  # fmt: skip
        print(json.dumps(shown, indent=2))
        return 0
    print(f"# size {resolved.recipe.size or '-'}: {resolved.size_why}")
    for line in filter(None, (resolved.taken, random_base(resolved.recipe))):
        print(f"# {line}")
    if changed:
        print("\n".join(_comments(f"changed against {resolved.base_name}", changed, "base", "was")))
    print("\n".join(_comments("differs from the defaults", differing, "default", "default")))
    print(_documented(values))
    return 0


def _schema_entries() -> list[JsonObject]:
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


def _changed(values: JsonMapping, base: JsonMapping, prefix: str = "") -> dict[str, JsonObject]:
    """Key -> its value and that of the base, where they differ; mappings such as the architecture key by key."""
    changed: dict[str, JsonObject] = {}
    for name in {**base, **values}:
        new, old = values.get(name), base.get(name)
        if isinstance(new, dict) and isinstance(old, dict):
            changed |= _changed(new, old, f"{prefix}{name}.")
        elif new != old and (prefix or name != "recipe"):
            changed[f"{prefix}{name}"] = {"value": new, "base": old}
    return changed


def _differing(recipe: Recipe) -> dict[str, JsonObject]:
    """Key -> its value and the schema's default, where they differ."""
    from zoo.config.layers.keys import keys
    from zoo.config.layers.tree import values_of
    from zoo.config.schema import Recipe

    values = values_of(recipe)
    return {
        key.key: {"value": values[key.key], "default": key.default}
        for key in keys(Recipe).values()
        if values[key.key] != key.default and key.key != "model.arch"
    }


def _comments(head: str, pairs: Mapping[str, JsonMapping], other: str, words: str) -> list[str]:
    """Comment lines with keys, their values, and what stands under the name `other` beside them."""
    from zoo.config.layers.keys import show_value

    lines = [
        f"#   {key}: {show_value(pair['value'])} ({words} {show_value(pair[other])})" for key, pair in pairs.items()
    ]
    return [f"# {head}:", *lines]


def _documented(values: JsonMapping) -> str:
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
