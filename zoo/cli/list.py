"""
usage: zoo list [--json]

Shows model families with what they read, their sizes and the parallelism that tests prove, recipes, hardware overlays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zoo.cli.arguments import split_flags
from zoo.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Print what there is, as a table or as JSON."""
    flags, rest = split_flags(arguments, ("--json",))
    if rest:
        raise UserError(f"{rest[0]}: zoo list takes --json and nothing else")
    found = catalogue()
    print(json.dumps(found, indent=2) if "--json" in flags else _table(found))
    return 0


def catalogue() -> dict[str, Any]:
    """Families, recipes and hardware overlays by name."""
    from zoo.config.files import hardware_names, read_recipe, recipe_names, size_names
    from zoo.registry import families

    recipes = {name: read_recipe(name).tree for name in recipe_names()}
    return {
        "families": {
            family.name: {
                "title": family.title,
                "modalities": list(family.modalities),
                "sizes": size_names(family.name),
                "proved_parallelism": list(family.proved),
            }
            for family in families().values()
        },
        "recipes": {
            name: {
                "description": tree.get("description", ""),
                "family": (tree.get("model") or {}).get("family"),
                "published_size": tree.get("published_size"),
            }
            for name, tree in recipes.items()
        },
        "hardware": hardware_names(),
    }


def _table(found: dict[str, Any]) -> str:
    lines = ["families"]
    for name, family in found["families"].items():
        lines.append(f"  {name:<18} {family['title']}: {', '.join(family['modalities'])}")
        lines.append(f"  {'':<18} size={' | '.join(family['sizes']) or '-'}")
        proved = " ".join(family["proved_parallelism"]) or "none"
        lines.append(f"  {'':<18} parallelism with the gradients of one rank, by test: {proved}")
    lines.append("recipes")
    for name, recipe in found["recipes"].items():
        lines.append(f"  {name:<18} {recipe['description']}")
    lines += ["hardware", *(f"  {name}" for name in found["hardware"])]
    return "\n".join(lines)
