"""
usage: zoo eval CHECKPOINT [ROWS] [metrics=anls,wer] [out=FILE] [key=value ...] [--json]

Evaluates a checkpoint on rows: loss, and scores of its greedy answers by kind of row. CHECKPOINT is a Hugging Face folder or hub id,
zoo's own weights, or the folder or checkpoint of a run. ROWS is whatever data.train takes: a file, a folder, digits:heldout, or an
entry such as '{hub: org/set, split: test}'; without it, the rows that the run held out. Rows are read with the run's settings.

  metrics=NAME,NAME      exact_match, accuracy, anls, wer, cer, module:function; default: by each row's task or media
  out=FILE               writes a line of JSON for each row: prompt, answer, prediction, scores, loss
  max_new_tokens=256     most tokens of an answer
  batch=16 max_rows=N    rows answered at once; the first N rows only
  nproc=N parallel.tp=2  any key of the recipe (`zoo show --schema`): the layout doesn't change the result
  --json                 prints the scores as JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_places
from zoo.errors import UserError
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.tools.evaluate import Evaluation

USAGE = "zoo eval CHECKPOINT [ROWS] [metrics=...] [out=FILE] [key=value ...]"
WHOLE = {"max_new_tokens", "batch", "max_rows"}
NAMES = {"exact_match": "exact match", "anls": "ANLS", "wer": "WER (lower is better)", "cer": "CER (lower is better)"}
_WRONG = 5  # rows that are shown


def run(arguments: Sequence[str]) -> int:
    """Evaluate, and print a table."""
    places, overrides, values, as_json = split(arguments)
    if len(places) not in (1, 2):
        raise UserError(f"{len(places)} of CHECKPOINT and ROWS given: {USAGE}")
    path, *rows = places
    out = values.pop("out", None)

    from zoo.tools.evaluate import evaluate

    evaluation = evaluate(path, rows[0] if rows else None, overrides, out=out, in_process=True, **values)
    if as_json:
        print(json.dumps({name: getattr(evaluation, name) for name in ("rows", "loss", "scores", "by_kind")}))
        return 0
    print("\n".join([table(evaluation), *wrong(evaluation)]))
    if out is not None:
        print(f"{evaluation.rows} rows written to {out}")
    return 0


def split(arguments: Sequence[str]) -> tuple[list[str], list[str], JsonObject, bool]:
    """Arguments in their places, overrides of the recipe, options by name, and whether JSON is wanted."""
    flags, rest = split_flags(arguments, ("--json",))
    places, own, overrides = split_places(rest, (*WHOLE, "metrics", "out"))
    values: JsonObject = dict(own)
    for key in WHOLE & own.keys():
        if not own[key].isdecimal() or int(own[key]) < 1:
            raise UserError(f"{key}={own[key]}: wanted a whole number from 1")
        values[key] = int(own[key])
    if "metrics" in own:
        values["metrics"] = [name for name in own["metrics"].strip("[]").replace(" ", "").split(",") if name]
    return places, overrides, values, bool(flags)


def table(evaluation: Evaluation) -> str:
    """A line for each kind of row and one for all; a kind without a score has none there."""
    names = list(evaluation.scores)
    lines = [["kind", "rows", "loss", *(NAMES.get(name, name) for name in names)]]
    whole = {"rows": evaluation.rows, "loss": evaluation.loss, **evaluation.scores}
    for kind, values in [*evaluation.by_kind.items(), ("all", whole)]:
        cells = [f"{values[name]:.1%}" if name in values else "" for name in names]
        loss = f"{values['loss']:.4f}" if "loss" in values else ""
        lines.append([kind, f"{values['rows']:,}", loss, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def wrong(evaluation: Evaluation) -> list[str]:
    """The first rows whose answer is not exactly right, a line each."""
    missed = [row for row in evaluation.predictions if row["scores"].get("exact_match") == 0.0]
    lines = [f"  {row['source']}: {_short(row['prediction'])}, wanted {_short(row['answer'])}" for row in missed]
    return [f"{len(missed)} answers are not exactly right; the first:", *lines[:_WRONG]] if missed else []


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]} ...")
