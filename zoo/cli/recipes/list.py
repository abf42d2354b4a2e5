"""
usage: zoo list [NAME] [--json]
       zoo list families | recipes | hardware [--json]
       zoo list runs [FOLDER] [--json]

Shows model families with what they read and their sizes, the names of recipes, and hardware. NAME is one of these: a family (its
parts, and the parallelism that tests prove), a recipe or a GPU. A section shows all of its kind so.

With `runs` it shows the run folders beneath FOLDER (default: runs) with their state, step, loss and score.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags
from zoo.config.recipes.matrix import matrix, names_in
from zoo.errors import UserError
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from zoo.config.gpus import Gpu

SECTIONS = ("families", "recipes", "hardware")
_WIDTH = 118
_ON_HARDWARE = (
    "8xh200 are eight in a node, 2x8xh200 two such nodes; a100-40: the same GPU with 40 GB; 8x80gb: any of 80 GB; "
    "cpu: a machine without a GPU; auto: what is here"
)


def run(arguments: Sequence[str]) -> int:
    """Print what there is, as a table or as JSON."""
    flags, rest = split_flags(arguments, ("--json",))
    if rest[:1] == ["runs"] and len(rest) <= 2:
        return _runs(rest[1] if len(rest) == 2 else "runs", "--json" in flags)
    if len(rest) > 1:
        raise UserError(f"{rest[1]}: zoo list takes one name, or runs and a folder")
    listed = catalogue()
    if rest:
        listed = _section(listed, rest[0])
        print(json.dumps(listed, indent=2) if "--json" in flags else _details(listed))
        return 0
    print(json.dumps(listed, indent=2) if "--json" in flags else _overview(listed))
    return 0


def _runs(folder: str, as_json: bool) -> int:
    from zoo.tools.runs.status import find_runs, table

    runs = find_runs(folder)
    if as_json:
        print(json.dumps([run.to_json() for run in runs], indent=2))
    else:
        print(table(runs) if runs else f"no runs in {folder}")
    return 0


def catalogue() -> JsonObject:
    """Families, recipes and hardware by name."""
    from zoo.config.compose import about
    from zoo.config.files import CPU, size_names
    from zoo.config.gpus import GPUS
    from zoo.config.recipes.matrix import recipe_names
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


def _gpu(gpu: Gpu) -> JsonObject:
    names = ("memory_gb", "tflops", "capability", "attention", "fp8", "measured")
    return {**{name: getattr(gpu, name) for name in names}, "about": gpu.about()}


def _section(listed: JsonMapping, name: str) -> JsonObject:
    """The part of the catalogue that a name stands for: a section, or an entry of one; a family with its recipes."""
    if name in SECTIONS:
        return {name: listed[name]}
    part: JsonObject = {section: {name: listed[section][name]} for section in SECTIONS if name in listed[section]}
    if not part:
        from zoo.config.layers.keys import nearest

        near = nearest(name[:100], [*SECTIONS, *(known for section in SECTIONS for known in listed[section])])
        hint = f"nearest: {', '.join(near)}" if near else "zoo list shows the names"
        raise UserError(f"{name}: no such family, recipe or GPU; {hint}")
    if "families" in part:
        part["recipes"] = {key: recipe for key, recipe in listed["recipes"].items() if recipe["family"] == name}
    return part


def _overview(listed: JsonMapping) -> str:
    """Everything by name, on a screen."""
    lines = ["families (zoo list NAME shows one)"]
    width = max(map(len, listed["families"]), default=0)
    for name, family in listed["families"].items():
        reads = ", ".join(family["modalities"])
        lines += _wrapped(f"  {name:<{width}}  {reads:<25}  ", ", ".join(family["sizes"]) or "-")
    lines.append(
        "recipes: FAMILY_TASK, as in recipe=qwen3_vl_dpo_lora; or family=qwen3_vl task=dpo adapter=lora (zoo list recipes)"
    )
    parts = matrix()
    tasks = list(dict.fromkeys(recipe.name.removeprefix(f"{recipe.family}_") for recipe in parts.values()))
    for head, names in (("FAMILY", names_in("families")), ("TASK", tasks)):
        lines += _wrapped(f"  {head:<{width}}  ", " ".join(names))
    for name in (name for name in listed["recipes"] if name not in parts):
        lines += _wrapped(f"  {name:<{width}}  ", listed["recipes"][name]["description"] or "-")
    lines.append("hardware, as in hardware=8xh200 (zoo list hardware)")
    lines += _wrapped("  ", " ".join(listed["hardware"]))
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _details(listed: JsonMapping) -> str:
    """All that is known of some entries."""
    lines = []
    for name, family in listed.get("families", {}).items():
        lines.append(f"{name:<18} {family['title']}: {', '.join(family['modalities'])}")
        lines.append(f"{'':<18} size={' | '.join(family['sizes']) or '-'}")
        inner = [f"{part} (of {outer})" for part, outer in family["inner_parts"].items()]
        lines.append(f"{'':<18} parts: {', '.join([*family['parts'], *inner])}")
        proved = " ".join(family["proved_parallelism"]) or "none"
        lines.append(f"{'':<18} parallelism with the gradients of one rank, by test: {proved}")
    width = max(18, *map(len, listed.get("recipes", {"": 0})))
    lines += [f"{name:<{width}} {recipe['description'] or ''}" for name, recipe in listed.get("recipes", {}).items()]
    if len(lines) == 1 and "recipes" in listed:
        (name,) = listed["recipes"]
        lines.append(f"{'':<{width}} zoo show recipe={name}")
    if len(listed.get("hardware", {})) > 1:
        lines.append(_ON_HARDWARE)
    lines += [
        f"{name:<18} {gpu.get('about', 'a machine without a GPU')}" for name, gpu in listed.get("hardware", {}).items()
    ]
    return "\n".join(lines)
