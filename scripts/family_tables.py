"""Writes the tables in the families' READMEs that follow from what is registered: python scripts/family_tables.py."""

from __future__ import annotations

import re
from pathlib import Path

from zoo.config.compose import about, load_recipe
from zoo.config.files import recipe_names, size_names
from zoo.registry import ModelFamily, families

MODELS = Path(__file__).parents[1] / "models"
BEGIN, END = "<!-- registered: written by scripts/family_tables.py -->", "<!-- end -->"


def table(family: ModelFamily) -> str:
    """The block of a family: what it is registered with, and the recipes that train it."""
    recipes = [load_recipe(name) for name in recipe_names() if about(name)["family"] == family.name]
    kinds = {recipe.recipe: bool(recipe.lora.rank) for recipe in recipes}

    def code(names: list[str] | tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names) or "none"

    inner = [f"; within `{family.within(part)}`: `{part}`" for part in family.inner]
    rows = [
        ("`model_type`", code(family.load("config").kinds)),
        ("reads", ", ".join(family.modalities)),
        ("parts that `model.freeze` and `train.lr_scale` name", code(family.parts) + "".join(inner)),
        ("recipes that train all weights", code([name for name, lora in kinds.items() if not lora])),
        ("recipes that train adapters (LoRA)", code([name for name, lora in kinds.items() if lora])),
        ("sizes", code(size_names(family.name))),
        ("parallelism with one rank's gradients, by test", code(family.proved)),
    ]
    lines = ["| registered | |", "|---|---|", *(f"| {name} | {what} |" for name, what in rows)]
    return "\n".join([BEGIN, *lines, END])


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
