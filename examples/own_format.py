"""Rows of a form of your own: a function turns each into one that zoo knows, and a recipe names it."""

import json
import random
from pathlib import Path
from typing import Any

import zoo

FOLDER = Path("runs/own_format")


def sums(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the file below, as question and answer. Any form of docs/data.md may be returned.

    What it raises makes a bad row, which data.on_error decides about.
    """
    left, right = row["terms"]
    return {"query": f"{left} + {right}", "response": str(left + right), "system": row.get("rules")}


def write_rows(count: int) -> Path:
    """A JSONL file of a form that only `sums` knows."""
    file = FOLDER / "rows.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    rows = [{"terms": [dice.randrange(5), dice.randrange(5)], "rules": "Add."} for _ in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


if __name__ == "__main__":  # the ranks import this file for `sums`
    recipe = zoo.load_recipe(
        "qwen3_vl_sft",
        overrides=[
            "size=tiny",
            "nproc=1",
            f"data.train={{path: {write_rows(64)}, format: {Path(__file__).resolve()}:sums, held_out: 0.1}}",
            "packing.budget=256",
            "train.steps=20",
            "train.warmup_steps=5",
            "train.global_batch=2",
            "train.lr=2e-3",
            f"run.dir={FOLDER / 'run'}",
        ],
    )
    result = zoo.train(recipe)
    print(f"{result.steps} steps on sums, loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
