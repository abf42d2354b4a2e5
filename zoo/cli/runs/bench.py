"""
usage: zoo bench train | data | saves [key=value ...] [--json]
       zoo bench train [key=value ...] [--profile]

train measures full training steps of random weights on the same samples (an image of 400 to 1,440 tokens and 100 to 600
tokens of text), packed, padded, and under transformers alone: ms, real tokens/s, MFU, memory. Each setting runs in
processes of its own; --json prints one line for each as soon as it is there, --profile where the time of its steps goes.

  recipe=qwen35_vl_sft size=2b           whose model; layers=8 takes so many of its decoder
  settings=packed:8,padded:4,hf:4        packed:N samples a row; row:TOKENS, filled by zoo's packer; padded:N to the longest
                                         or padded:NxWIDTH; hf:N and hf:NxWIDTH, the same under transformers
  backends=torch,te nproc=1              of zoo's settings; processes, one a GPU
  samples=64 passes=2                    how many samples (of a data-parallel rank), and how often they are timed
  batch=8                                micro-batches a step, all ranks together; default: one a data-parallel rank
  longest=2048 out=bench.json            most tokens of a sample; file for the results
  warm_steps=60                          steps before any is timed; at least 4 and one pass over the samples
  routing=even                           draws experts evenly at random: random weights send most tokens to a few of them
  data=my.jsonl                          these rows, read by training's own loader, for settings row:TOKENS and padded:N
  engine.recompute=full parallel.cp=2    any key of the recipe that has a dot

data measures how fast a recipe's samples are read and encoded, what share of a step is spent waiting for them, and
whether memory grows while they go through the loader.

  recipe=qwen3_vl_sft size=tiny          whose processor and data; data=my.jsonl takes other rows
  rows=500                               how many are measured and encoded one by one
  samples=2000 cache_mb=64               how many go through the loader, with such a cache, while memory is watched
  step_ms=200 steps=20                   length and number of the steps that training is taken to have

saves shows what the saves of a run cost its steps, from its log.

  run=runs/demo                          the folder of the run
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zoo.cli.arguments import split_flags
from zoo.errors import UserError
from zoo.types import JsonObject


def run(arguments: Sequence[str]) -> int:
    """Measure what the first argument names, and print a table or JSON."""
    flags, rest = split_flags(arguments, ("--json", "--profile"))
    name, *values = rest or [""]
    if "--profile" in flags and name != "train":
        raise UserError("--profile: zoo bench train alone has it")
    if name not in BENCHES:
        raise UserError(f"{name or 'zoo bench'}: name what to measure: zoo bench {' | '.join(BENCHES)}")
    print(BENCHES[name](values, flags))
    return 0


def train_options(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of `zoo bench train`, and the recipe's keys.

    Raises:
        UserError: a key that it does not have, or a value of another type.
    """
    from zoo.bench.options import read_options, split_recipe_keys
    from zoo.bench.training.train import TrainBenchOptions

    bench_keys, recipe_keys = split_recipe_keys(arguments)
    return read_options(TrainBenchOptions, bench_keys), recipe_keys


def _train(arguments: Sequence[str], flags: set[str]) -> str:
    options, recipe_keys = train_options(arguments)

    from zoo.bench.training import train as bench

    def on_line(line: JsonObject) -> None:
        print(json.dumps(line) if "--json" in flags else bench.row(line), flush=True)

    if "--json" not in flags:
        print(bench.HEAD, flush=True)
    report = bench.run(options, recipe_keys, on_line, "--profile" in flags)
    if "--json" in flags:
        return json.dumps({key: value for key, value in report.items() if key != "lines"})
    return bench.where(report) + (f"; written to {options.out}" if options.out else "")


def _data(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import data
    from zoo.bench.options import read_options

    report = data.run(read_options(data.DataBenchOptions, arguments))
    return json.dumps(data.as_dict(report), indent=2) if "--json" in flags else data.table(report)


def _saves(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import saves
    from zoo.bench.options import read_options

    if any(not argument.startswith("run=") for argument in arguments):
        raise UserError(
            "zoo bench saves: takes run=FOLDER alone; a disk and saves of a new model are measured by "
            "`python -m benchmarks.save_rates`, run in a clone of zoo"
        )
    report = saves.run(read_options(saves.SaveBenchOptions, arguments))
    return saves.as_json(report) if "--json" in flags else saves.table(report)


BENCHES = {"train": _train, "data": _data, "saves": _saves}
