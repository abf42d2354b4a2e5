"""Checkpoints: train for two steps, convert the export to zoo's own weights, compare both, score some answers."""

from pathlib import Path

from transformers import AutoModelForImageTextToText

import zoo

FOLDER = Path("runs/checkpoints")
ROWS = [
    {"messages": [{"role": "user", "content": "1 2 3, then?"}, {"role": "assistant", "content": answer}]}
    for answer in ("4", "four")
]

# A run exports a Hugging Face folder at its end. Published weights in such a folder, or a hub id, do as well.
recipe = zoo.load_recipe(
    "qwen3_vl_sft", overrides=["size=tiny", "nproc=1", "packing.budget=256", f"run.dir={FOLDER / 'run'}"]
).replace(train={"steps": 2, "warmup_steps": 0, "global_batch": 2, "eval_rows": 2})
published = Path(zoo.train(recipe).run_dir) / "export"

# The same weights under zoo's names, in safetensors: any parallel layout reads them.
weights = zoo.convert(published, FOLDER / "weights", overwrite=True)
print(f"{published} -> {weights}")

# Every tensor is compared as zoo has it. rows= would compare log-probabilities with those of transformers, too.
found = zoo.verify(published, weights)
print(f"tensors: {found.counts}, equal: {found.equal}")

# The log-probability of each answer token, packed or not, under any layout.
for row, scored in zip(ROWS, zoo.score(weights, ROWS), strict=True):
    total = sum(scored["logprobs"])
    print(f"log-probability of {row['messages'][1]['content']!r}: {total:.2f}")

# transformers loads the export as it is.
model = AutoModelForImageTextToText.from_pretrained(published)
print(f"transformers reads {sum(weight.numel() for weight in model.parameters()):,} parameters")
