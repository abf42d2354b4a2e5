"""Writes the tables in the families' READMEs that follow from what is registered: python scripts/family_tables.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from zoo.config.compose import about
from zoo.config.files import size_names
from zoo.config.recipes.matrix import LORA, matrix, recipe_names
from zoo.registry import ModelFamily, families

MODELS = Path(__file__).parents[1] / "models"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]*\w")  # in the first line of a size's file
BEGIN, END = "<!-- scripts/family_tables.py -->", "<!-- end -->"


def code(names: Iterable[str]) -> str:
    """The names as code, in one line."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def table(family: ModelFamily) -> str:
    """The block of a family: what it is registered with, the recipes that train it, and its sizes."""
    names = [name for name in recipe_names() if about(name)["family"] == family.name]
    own = [name for name in names if name not in matrix()]
    inner = [f"; in `{family.within(part)}`: `{part}`" for part in family.inner]
    rows = [
        ("`model_type`", code(family.load("config").kinds)),
        ("`model.freeze`", code(family.parts) + "".join(inner)),
        ("recipes", recipes(name for name in names if name in matrix())),
        *([("recipes of its own", recipes(own))] if own else []),
        *((f"`size={size}`", about_size(family.name, size)) for size in size_names(family.name)),
    ]
    lines = ["| registered | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    return "\n".join([BEGIN, *lines, END])


def recipes(names: Iterable[str]) -> str:
    """Names of recipes, those of the same tasks together: `a_`, `a_moe_`: `{dpo,embed}[_lora]`, `lora`, `sft`."""
    tasks: dict[str, list[str]] = {}
    for name in names:
        stem = f"{matrix()[name].family if name in matrix() else about(name)['family']}_"
        stem = stem if name.startswith(stem) else name
        tasks.setdefault(stem, []).extend([rest] if (rest := name.removeprefix(stem)) else [])
    stems: dict[tuple[str, ...], list[str]] = {}
    for stem, own in tasks.items():
        both = [name for name in own if f"{name}_{LORA}" in own]
        alone = [name for name in own if not {name, name.removesuffix(f"_{LORA}")} & {*both}]
        named = f"{{{','.join(both)}}}" if both[1:] else "".join(both)
        stems.setdefault((*([f"{named}[_{LORA}]"] if both else []), *alone), []).append(stem)
    return "; ".join(code(names) + (f": {code(own)}" if own else "") for own, names in stems.items()) or "none"


def about_size(family: str, size: str) -> str:
    """The ids that a size was published under, or what its file says of a size that was not."""
    folder = files("zoo.recipes") / "sizes" / family
    first = (folder / f"{size}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    ids = [text.rstrip(".,;") for text in HUB_ID.findall(first)]
    if ids:
        return code(f"model.init={hub_id}" for hub_id in ids)
    return first.removeprefix("# ").partition(", for two CPU cores")[0] + "; random weights"


def with_table(readme: str, family: ModelFamily) -> str:
    """A README with its block as it should be; ValueError where it has no place for one."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"models/{family.name}/README.md: wanted one block from {BEGIN} to {END}")
    return pattern.sub(lambda _: table(family), readme)


def main() -> None:
    """Rewrite the READMEs of the families in this repository."""
    for family in families().values():
        path = MODELS / family.name / "README.md"
        if path.is_file():
            path.write_text(with_table(path.read_text(encoding="utf-8"), family), encoding="utf-8")


if __name__ == "__main__":
    main()
