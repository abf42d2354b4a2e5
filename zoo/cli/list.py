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
    """Families, recipes and hardware by name."""
    from zoo.config.compose import about
    from zoo.config.files import hardware_names, read_hardware, recipe_names, size_names
    from zoo.registry import families

    return {
        "families": {
            family.name: {
                "title": family.title,
                "modalities": list(family.modalities),
                "parts": list(family.parts),
                "sizes": size_names(family.name),
                "proved_parallelism": list(family.proved),
            }
            for family in families().values()
        },
        "recipes": {name: about(name) for name in recipe_names()},
        "hardware": {name: dict(read_hardware(name).tree.get("machine") or {}) for name in hardware_names()},
    }


def _table(found: dict[str, Any]) -> str:
    lines = ["families"]
    for name, family in found["families"].items():
        lines.append(f"  {name:<18} {family['title']}: {', '.join(family['modalities'])}")
        lines.append(f"  {'':<18} size={' | '.join(family['sizes']) or '-'}")
        lines.append(f"  {'':<18} parts: {', '.join(family['parts'])}")
        proved = " ".join(family["proved_parallelism"]) or "none"
        lines.append(f"  {'':<18} parallelism with the gradients of one rank, by test: {proved}")
    lines.append("recipes")
    width = max(18, *map(len, found["recipes"]))
    for name, recipe in found["recipes"].items():
        lines.append(f"  {name:<{width}} {recipe['description'] or ''}")
    lines.append("hardware")
    for name, machine in found["hardware"].items():
        size = machine.get("memory_gb")
        about = (
            f"{size} GB a GPU: hardware=8x{name}, or of several nodes 2x8x{name}"
            if size
            else f"hardware={name}"
        )
        lines.append(f"  {name:<18} {about}")
    lines.append(f"  {'auto':<18} what is here")
    return "\n".join(lines)
