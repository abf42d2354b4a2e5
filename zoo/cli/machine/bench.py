"""
usage: zoo bench train | plot | packing | balance | data | convert | saves | soak [key=value ...] [--json]
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
  routing=even                           draws experts evenly at random: random weights send most tokens to a few of them
  data=my.jsonl                          these rows, read by training's own loader, for settings row:TOKENS and padded:N
  engine.recompute=full parallel.cp=2    any key of the recipe that has a dot

plot draws results of train, ms, real tokens/s and memory against tokens a step, packed and padded.

  results=bench.json out=bench.png       what train wrote; the picture

packing measures what packing costs: layout, packing, context-parallel slicing and unpacking of int64 ids, labels and
positions, each as milliseconds and bytes and as a ratio to one torch.index_select of the same data.

  samples=64 shortest=50 longest=4000    how many samples, and their lengths in tokens; seed=0
  cp=2,4                                 context-parallel sizes; segments are aligned to 2 * cp
  device=cpu threads=1 repeats=30        where, on how many cores, and how often; medians are shown

balance measures how full packed rows are and how evenly ranks share the work, on lengths of receipts, of a LLaVA mixture
and of long videos: rows dealt out as they come, packed by tokens, and packed by tokens and cost as in training.

  recipe=qwen3_vl_sft size=2b            whose FLOPs a sample costs
  count=100000 ranks=8,64 bins=1         rows of each set, data-parallel ranks, packed rows that a rank takes a step
  lookahead=256 align=1 seed=0           data.lookahead, packing.align

data measures how fast a recipe's samples are read and encoded, what share of a step is spent waiting for them, and
whether memory grows while they go through the loader.

  recipe=qwen3_vl_sft size=tiny          whose processor and data; data=my.jsonl takes other rows
  rows=500                               how many are measured and encoded one by one
  samples=2000 cache_mb=64               how many go through the loader, with such a cache, while memory is watched
  step_ms=200 steps=20                   length and number of the steps that training is taken to have

convert measures the conversion of a synthetic checkpoint of a published size to zoo and back, in seconds and peak memory,
beside a plain copy of its files.

  recipe=qwen3_vl_sft size=4b            whose names and shapes it has, in bf16
  folder=. shard_mb=2000                 where, on a disk with room for two of it; most MB of a weights file
  layers=8                               takes so many of its decoder

saves measures a disk, and what zoo's saves and loads of a model reach there: bytes, stall, rates beside the disk's own,
host memory, and steps beside a save. With run= it shows what the saves of that run cost its steps, from its log.

  recipe=qwen3_vl_sft size=2b nproc=1    what is trained on synthetic rows and saved; layers=8 takes so many of its decoder
  folder=. disk_mb=4096                  where, with room for three checkpoints; MB that dd writes and reads there
  saves=2 steps=4 longest=256            how many saves; steps before and beside each; most tokens of a sample
  engine.precision=bf16 parallel.tp=2    any key of the recipe that has a dot
  run=runs/demo                          the folder of a run, in the place of all that

soak watches a long run of small steps, with evaluations and saves, for memory, open files and step times that grow.

  recipe=qwen3_vl_sft size=tiny nproc=1  what is trained; further keys of the recipe (with a dot) can be given
  steps=10000 every=500 after=1000       steps, between two evaluations or saves, and before growth is counted
  folder=soak                            where the run, soak.json and soak.png (a plot) go
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from zoo.cli.arguments import split_flags, split_values
from zoo.errors import UserError

if TYPE_CHECKING:
    from zoo.bench.packing_report import Options


def run(arguments: Sequence[str]) -> int:
    """Measure what the first argument names, and print a table or JSON."""
    flags, rest = split_flags(arguments, ("--json", "--profile"))
    what, *values = rest or [""]
    if "--profile" in flags and what != "train":
        raise UserError("--profile: zoo bench train alone has it")
    if what not in BENCHES:
        raise UserError(f"{what or 'zoo bench'}: name what to measure: zoo bench {' | '.join(BENCHES)}")
    print(BENCHES[what](values, flags))
    return 0


def packing_options(arguments: Sequence[str]) -> Options:
    """The options of `zoo bench packing`.

    Raises:
        UserError: a key that it does not have, or a value that is none of its kind.
    """
    from zoo.bench.packing_report import Options

    try:
        return Options(**_values(arguments, Options))
    except ValueError as error:
        raise UserError(str(error)) from None


def _values(arguments: Sequence[str], options: Any) -> dict[str, Any]:
    """`key=value` of the fields of a dataclass, as what their defaults are: text, an integer or several."""
    known = {field.name: field.default for field in fields(options)}
    values: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in known:
            near = get_close_matches(key, known, n=1) or list(known)
            raise UserError(f"{key}: no such key; nearest: {', '.join(near)}")
        default = known[key]
        try:
            if isinstance(default, str):
                values[key] = text
            elif isinstance(default, tuple):
                kind = type(default[0])
                values[key] = tuple(kind(value) for value in text.split(","))
            else:
                values[key] = int(text)
        except ValueError:
            wanted = "integers" if isinstance(default, tuple) else "an integer"
            raise UserError(f"{argument}: {wanted} wanted") from None
    return values


def _packing(arguments: Sequence[str], flags: set[str]) -> str:
    options = packing_options(arguments)

    from zoo.bench.packing import run
    from zoo.bench.packing_report import as_dict, table

    report = run(options)
    return json.dumps(as_dict(report), indent=2) if "--json" in flags else table(report)


def _balance(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import balance as bench

    options = bench.Options(**_values(arguments, bench.Options))
    report = bench.run(options)
    return (
        json.dumps(bench.as_dict(options, report), indent=2)
        if "--json" in flags
        else bench.table(options, report)
    )


def _data(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import data as bench_data

    report = bench_data.run(bench_data.Options(**_values(arguments, bench_data.Options)))
    return json.dumps(bench_data.as_dict(report), indent=2) if "--json" in flags else bench_data.table(report)


def _convert(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import convert as bench_convert

    report = bench_convert.run(bench_convert.Options(**_values(arguments, bench_convert.Options)))
    return json.dumps(report, indent=2) if "--json" in flags else bench_convert.table(report)


def train_options(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of `zoo bench train`, and what is left for the recipe: keys with a dot.

    Raises:
        UserError: a key that it does not have, or a value that is none of its kind.
    """
    from zoo.bench.training.train import Options

    overrides = [argument for argument in arguments if "." in argument.partition("=")[0]]
    return Options(**_values([a for a in arguments if a not in overrides], Options)), overrides


def _train(arguments: Sequence[str], flags: set[str]) -> str:
    options, overrides = train_options(arguments)

    from zoo.bench.training import train as bench

    def on_line(line: dict[str, Any]) -> None:
        print(json.dumps(line) if "--json" in flags else bench.row(line), flush=True)

    if "--json" not in flags:
        print(bench.HEAD, flush=True)
    report = bench.run(options, overrides, on_line, "--profile" in flags)
    if "--json" in flags:
        return json.dumps({key: value for key, value in report.items() if key != "lines"})
    return bench.where(report) + (f"; written to {options.out}" if options.out else "")


def _saves(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import saves as bench_saves

    if not any(argument.startswith("run=") for argument in arguments):
        return _save_rates(arguments, flags)
    found = bench_saves.run(bench_saves.Options(**_values(arguments, bench_saves.Options)))
    return bench_saves.as_json(found) if "--json" in flags else bench_saves.table(found)


def _save_rates(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import save_rates

    overrides = [text for text in arguments if "." in text.partition("=")[0]]
    own = _values([text for text in arguments if text not in overrides], save_rates.Options)
    found = save_rates.run(save_rates.Options(**own), overrides)
    return save_rates.as_json(found) if "--json" in flags else save_rates.table(found)


def _soak(arguments: Sequence[str], flags: set[str]) -> str:
    from zoo.bench import soak as bench_soak

    overrides = [text for text in arguments if "." in text.partition("=")[0]]
    own = [text for text in arguments if text not in overrides]
    report = bench_soak.run(bench_soak.Options(**_values(own, bench_soak.Options)), overrides)
    return json.dumps(bench_soak.as_dict(report), indent=2) if "--json" in flags else bench_soak.table(report)


def _plot(arguments: Sequence[str], flags: set[str]) -> str:
    from pathlib import Path

    from zoo.bench import plot as bench_plot

    _, given = split_values(arguments, ("results", "out"), "zoo bench plot results=FILE out=FILE", ())
    if set(given) != {"results", "out"}:
        raise UserError(
            "zoo bench plot: results=FILE, as zoo bench train writes it, and out=FILE.png are wanted"
        )
    return f"drawn to {bench_plot.draw(bench_plot.read(given['results']), Path(given['out']))}"


BENCHES = {
    "train": _train,
    "plot": _plot,
    "packing": _packing,
    "balance": _balance,
    "data": _data,
    "convert": _convert,
    "saves": _saves,
    "soak": _soak,
}
