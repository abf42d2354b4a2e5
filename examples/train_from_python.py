"""Train on rows of your own: write pictures and a JSONL file, then train a tiny Qwen3-VL on them."""

import json
import random
from pathlib import Path

from PIL import Image

import zoo

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 70, 220)}
FOLDER = Path("runs/colours")


def write_rows(name: str, count: int) -> Path:
    """A JSONL file of questions about pictures of one colour, and the pictures beside it."""
    file = FOLDER / "rows" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    dice, lines = random.Random(name), []
    for number in range(count):
        colour = dice.choice(list(COLOURS))
        picture = file.parent / f"{name}_{number}.png"
        size = (dice.randrange(32, 96), dice.randrange(32, 96))  # any sizes: packing mixes them in one row
        Image.new("RGB", size, COLOURS[colour]).save(picture)
        messages = [
            {"role": "user", "content": "<image>Which colour is this?"},
            {"role": "assistant", "content": colour},
        ]
        lines.append(json.dumps({"messages": messages, "images": [picture.name]}))
    file.write_text("\n".join(lines) + "\n")
    return file


recipe = zoo.load_recipe(
    "qwen3_vl_sft",
    overrides=[
        "size=tiny",  # 1.3 M parameters, random weights, any CPU
        "nproc=1",
        f"data.train={write_rows('train', 96)}",
        f"data.eval={write_rows('heldout', 12)}",
        "data.augment=0",  # changed colours would be other answers
        "packing.budget=256",
        "train.steps=30",
        "train.warmup_steps=5",
        "train.global_batch=2",
        "train.lr=2e-3",
        f"run.dir={FOLDER / 'run'}",
    ],
)
result = zoo.train(recipe)
print(f"{result.steps} steps, loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
print(f"{result.metrics['exact_match']:.0%} of the held-out answers are exactly right")
print(f"The model is in {result.run_dir}/export, as transformers reads it.")
