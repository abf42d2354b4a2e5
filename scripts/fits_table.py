"""Writes the tables of docs/fits.md: which published size fits which GPUs, by the planner. `python scripts/fits_table.py`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from zoo.config.compose import load_recipe
from zoo.config.files import size_names
from zoo.config.schema import Recipe
from zoo.engine.planning.plan import model_of
from zoo.planner.layouts import first_fit
from zoo.planner.memory import Model, memory
from zoo.planner.rows import typical_row

PAGE = Path(__file__).parents[1] / "docs" / "fits.md"
BEGIN, END = "<!-- tables: written by scripts/fits_table.py -->\n", "<!-- end of tables -->\n"
FAMILIES = {
    "qwen3_omni": "Qwen3-Omni",
    "qwen3_vl": "Qwen3-VL",
    "qwen35_vl": "Qwen3.5-VL",
    "qwen25_vl": "Qwen2.5-VL",
    "qwen25_omni": "Qwen2.5-Omni",
    "internvl": "InternVL 3.5",
    "gemma3": "Gemma 3",
    "gemma3_text": "Gemma 3, text",
    "gemma4": "Gemma 4",
    "glm45v": "GLM",
    "llava": "LLaVA",
    "qwen3_asr": "Qwen3-ASR",
    "qwen3": "Qwen3",
    "qwen3_next": "Qwen3-Next",
}
WAYS = {"sft": "All weights", "lora": "LoRA"}
COUNTS = {1: "1x", 2: "2x", 4: "4x", 8: "8x", 16: "2x8x"}
MEMORY = (80, 141)  # GB, as in H100 and H200
MOMENTS = {"bf16": "m", "fp8": "M"}
RECOMPUTE = {"selective": "r", "full": "R"}


def sizes() -> list[tuple[str, str]]:
    """(family, size) of all that are published."""
    return [(family, size) for family in FAMILIES for size in size_names(family) if "tiny" not in size]


def recipe_name(family: str, size: str, way: str) -> str:
    """The recipe that trains a size in one of WAYS."""
    if family in ("qwen3", "qwen3_vl", "qwen35_vl") and size.rpartition("-")[2].startswith("a"):
        return f"{family}_moe_{way}"
    return f"llava_onevision_{way}" if size.startswith("onevision") else f"{family}_{way}"


@cache
def _model(name: str, size: str) -> Model:
    return model_of(load_recipe(name, [f"size={size}"]))


def cell(name: str, size: str, gpus: int, memory_gb: int) -> str:
    """GB of the fullest GPU, and the layout; "-" where nothing fits."""
    recipe = load_recipe(
        name, [f"size={size}", f"hardware={COUNTS[gpus]}{'h200' if memory_gb > 80 else 'h100'}"]
    )
    model = _model(name, size)
    row = typical_row(recipe, model.cost)
    chosen = first_fit(model, recipe, gpus, row)
    if chosen is None:
        return "-"
    need = max(stage.total for stage in memory(model, chosen, row, gpus, fused=True))
    return f"{need / 1e9:.0f} {_layout(chosen)}".rstrip()


def _layout(chosen: Recipe) -> str:
    parallel = chosen.parallel
    cuts = [
        f"{name}{getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(parallel, name) > 1
    ]
    marks = MOMENTS.get(chosen.train.exp_avg_sq_dtype, "") + RECOMPUTE.get(chosen.engine.recompute, "")
    return " ".join([*cuts, marks])


def line(family: str, size: str, way: str, memory_gb: int) -> str:
    """A size's line of a table."""
    name = recipe_name(family, size, way)
    cells = [cell(name, size, gpus, memory_gb) for gpus in COUNTS]
    return f"| {FAMILIES[family]} {size} | " + " | ".join(cells) + " |"


def tables() -> Iterator[str]:
    """The lines of all tables."""
    for way, title in WAYS.items():
        for memory_gb in MEMORY:
            yield f"### {title}, GPUs of {memory_gb} GB\n"
            yield "| size | " + " | ".join(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS) + " |"
            yield "|" + "---|" * (1 + len(COUNTS))
            yield from (line(family, size, way, memory_gb) for family, size in sizes())
            yield ""


def main() -> None:
    """Write the page anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    made = "\n".join(tables())
    PAGE.write_text(before + BEGIN + "\n" + made + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
