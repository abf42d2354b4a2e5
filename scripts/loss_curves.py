"""Loss curves of runs that hold optimizer state and gradients in fewer bytes, against those in fp32.

    python scripts/loss_curves.py OUT.json [--recipes qwen3_vl_sft,...] [--forms "fp32;bf16"] [--seeds 3] [--steps 1000] [--jobs 1] [--size SIZE] [--keys KEY=VALUE ...]

Trains a tiny size of each recipe on the bundled digits, in bf16, once for each form and seed, and writes the held-out exact match
and loss at the end, and the mean training loss of every hundred steps. Runs that OUT.json has already are not made again, so
an interrupted call continues. Prints a markdown table: mean over seeds, and the spread of fp32's.

`--jobs` runs go on at once, on the GPUs in turn where there are several.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from zoo.config.devices import gpu_count

RECIPES = {"qwen3_vl_sft": "tiny", "qwen3_vl_moe_sft": "tiny-moe", "qwen35_vl_sft": "tiny"}
MOMENTS = ("train.exp_avg_dtype", "train.exp_avg_sq_dtype")
FORMS = {
    "fp32": (),
    "bf16": tuple(f"{key}=bf16" for key in MOMENTS),
    "fp8": tuple(f"{key}=fp8" for key in MOMENTS),
    "fp8, gradients bf16": (*(f"{key}=fp8" for key in MOMENTS), "train.main_grads_dtype=bf16"),
}
# The optimizer and schedule of every tiny size here; some of their recipes use Muon, which has no such state.
ADAMW = (
    "train.optimizer=adamw", "train.lr=1.2e-3", "train.min_lr=2e-5", "train.warmup_steps=40", "train.weight_decay=0",
)  # fmt: skip
EVERY = 100  # steps of a point of a curve


def run(recipe: str, size: str, form: str, seed: int, steps: int, more: list[str], gpu: int | None) -> dict[str, Any]:
    """One run: held-out metrics at its end, and the curve of its training loss. gpu: the one to take, None for what there is."""
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    with tempfile.TemporaryDirectory() as folder:
        keys = (
            f"recipe={recipe}", f"size={size}", "engine.precision=bf16", f"train.steps={steps}", f"run.seed={seed}",
            "nproc=1", "engine.threads=1", "export=false", "log.tensorboard=false", f"run.dir={folder}", *(ADAMW if size == RECIPES[recipe] else ()), *FORMS[form], *more,
        )  # fmt: skip
        command = [sys.executable, "-m", "zoo", "train", *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        summary = json.loads(Path(folder, "summary.json").read_text())
        lines = map(json.loads, Path(folder, "train.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "grad_norm" in line]
    curve = [round(mean(losses[first : first + EVERY]), 5) for first in range(0, len(losses), EVERY)]
    held_out = {name: summary["metrics"][name] for name in ("loss", "exact_match")}
    about = {"recipe": recipe, "size": size, "form": form, "seed": seed, "steps": steps, "keys": more}
    return {**about, "curve": curve, **held_out}


def table(results: list[dict[str, Any]]) -> str:
    """Held-out exact match and loss by recipe and form."""
    lines = ["| recipe | state | seeds | exact match | loss |", "|---|---|---|---|---|"]
    for recipe in RECIPES:
        for form in FORMS:
            runs = [result for result in results if (result["recipe"], result["form"]) == (recipe, form)]
            if runs:
                cells = (_cell([result[name] for result in runs]) for name in ("exact_match", "loss"))
                lines.append(f"| {recipe} | {form} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--forms", default=";".join(FORMS), help="separated by ;")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", help="instead of the recipe's tiny one")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--keys", nargs="*", default=[], help="further keys of every run")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {tuple(result[name] for name in ("seed", "recipe", "size", "form", "steps")) for result in results}
    wanted = (
        (seed, recipe, options.size or RECIPES[recipe], form)
        for seed, recipe, form in product(range(options.seeds), options.recipes.split(","), options.forms.split(";"))
    )
    left = [settings for settings in wanted if (*settings, options.steps) not in done]
    gpus = gpu_count()
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = []
        for number, (seed, recipe, size, form) in enumerate(left):
            gpu = number % gpus if gpus > 1 else None
            runs.append(pool.submit(run, recipe, size, form, seed, options.steps, options.keys, gpu))
        for future in as_completed(runs):
            results.append(future.result())
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(results[-1]), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
