"""
usage: zoo list [--json]
       zoo list runs [FOLDER] [--json]

Shows model families with what they read, their sizes and the parallelism that tests prove, recipes, hardware.

With `runs` it shows the run folders beneath FOLDER (default: runs) with their state, step, loss and score.
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
    if rest[:1] == ["runs"] and len(rest) <= 2:
        return _runs(rest[1] if len(rest) == 2 else "runs", "--json" in flags)
    if rest:
        raise UserError(f"{rest[-1]}: zoo list takes --json, or runs and a folder")
    found = catalogue()
    print(json.dumps(found, indent=2) if "--json" in flags else _table(found))
    return 0


def _runs(folder: str, as_json: bool) -> int:
    from zoo.runs.listing import find_runs, table

    found = find_runs(folder)
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=2))
    else:
        print(table(found) if found else f"no runs in {folder}")
    return 0


def catalogue() -> dict[str, Any]:
    """Families, recipes and hardware by name."""
    from zoo.config.compose import about
    from zoo.config.files import CPU, recipe_names, size_names
    from zoo.config.gpus import GPUS
    from zoo.registry import families

    return {
        "families": {
            family.name: {
                "title": family.title,
                "modalities": list(family.modalities),
                "parts": list(family.parts),
                "inner_parts": {part: family.within(part) for part in family.inner},
                "sizes": size_names(family.name),
                "proved_parallelism": list(family.proved),
            }
            for family in families().values()
        },
        "recipes": {name: about(name) for name in recipe_names()},
        "hardware": {CPU: {}} | {name: _gpu(gpu) for name, gpu in GPUS.items()},
    }


def _gpu(gpu: Any) -> dict[str, Any]:
    return {
        "memory_gb": gpu.memory_gb,
        "tflops": gpu.tflops,
        "capability": gpu.capability,
        "attention": gpu.attention,
        "fp8": gpu.fp8,
        "measured": gpu.measured,
        "about": gpu.about(),
    }


def _table(found: dict[str, Any]) -> str:
    lines = ["families"]
    for name, family in found["families"].items():
        lines.append(f"  {name:<18} {family['title']}: {', '.join(family['modalities'])}")
        lines.append(f"  {'':<18} size={' | '.join(family['sizes']) or '-'}")
        inner = [f"{part} (of {outer})" for part, outer in family["inner_parts"].items()]
        lines.append(f"  {'':<18} parts: {', '.join([*family['parts'], *inner])}")
        proved = " ".join(family["proved_parallelism"]) or "none"
        lines.append(f"  {'':<18} parallelism with the gradients of one rank, by test: {proved}")
    lines.append("recipes")
    width = max(18, *map(len, found["recipes"]))
    for name, recipe in found["recipes"].items():
        lines.append(f"  {name:<{width}} {recipe['description'] or ''}")
    lines.append("hardware")
    lines.append(
        "  8xh200 are eight in a node, 2x8xh200 two such nodes; a100-40: the same GPU with 40 GB; 8x80gb: any of 80 GB"
    )
    lines.append(f"  {'cpu':<18} a machine without a GPU")
    lines += [f"  {name:<18} {gpu['about']}" for name, gpu in found["hardware"].items() if gpu]
    lines.append(f"  {'auto':<18} what is here")
    return "\n".join(lines)
