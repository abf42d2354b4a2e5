"""
usage: zoo show recipe=NAME [key=value ...]
       zoo show --schema

Prints the recipe that `zoo train` would resolve from the same arguments, as YAML, headed by what differs from
the defaults of the schema. --schema prints every key with its type, default and meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zoo.cli.arguments import split_flags, split_recipe
from zoo.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Print a resolved recipe, or the schema."""
    flags, rest = split_flags(arguments, ("--schema",))
    if "--schema" in flags:
        if rest:
            raise UserError(f"{rest[0]}: zoo show --schema takes nothing else")
        print(_schema())
        return 0
    name, overrides = split_recipe(rest, "zoo show recipe=NAME")

    from omegaconf import OmegaConf

    from zoo.config.compose import resolve

    resolved = resolve(name, overrides)
    print(f"# size {resolved.recipe.size or '-'}: {resolved.size_why}")
    values = asdict(resolved.recipe)
    print("\n".join(_differences(values)))
    print(OmegaConf.to_yaml(OmegaConf.create(values)), end="")
    return 0


def _schema() -> str:
    from zoo.config.reference import schema_help, show_value
    from zoo.config.schema import CHOICES

    lines = []
    for entry in schema_help():
        kind = entry.type.replace(" | None", " or null")
        lines.append(f"{entry.key:<22} {kind:<16} {show_value(entry.default):<20} {entry.doc}")
        if entry.key in CHOICES and not all(choice in entry.doc for choice in CHOICES[entry.key]):
            lines.append(f"{'':<22} one of: {', '.join(CHOICES[entry.key])}")
    return "\n".join([f"{'key':<22} {'type':<16} {'default':<20} meaning", *lines])


def _differences(values: dict[str, Any]) -> list[str]:
    """Comment lines with the keys whose value is not the schema's default."""
    from zoo.config.reference import schema_help, show_value

    lines = ["# differs from the defaults:"]
    for entry in schema_help():
        value: Any = values
        for name in entry.key.split("."):
            value = value[name]
        if value != entry.default and entry.key != "model.arch":
            lines.append(f"#   {entry.key}: {show_value(value)} (default {show_value(entry.default)})")
    return lines
