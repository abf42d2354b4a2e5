"""
usage: zoo score CHECKPOINT [ROWS] [key=value ...]
       zoo score TEACHER ROWS top_k=64 out=FOLDER [temperature=1] [key=value ...]

Writes, for each row, the log-probabilities that a checkpoint gives the tokens of its answers: one JSON object a line with source,
token_ids, labels and logprobs (0.0 where there is no label). CHECKPOINT is a Hugging Face folder or hub id, zoo's own weights, or the
folder or checkpoint of a run. ROWS is whatever data.train takes: a file, a folder, digits:heldout, or an entry such as
'{hub: org/set, split: test}'; without it, the rows that the run held out. Rows are read with the run's settings.

With top_k= it writes the tokens that a teacher finds most likely at each of them, to a folder that distill.teacher names
(docs/distillation.md). The same command goes on with a folder that was left half-way.

  out=FILE               where to write; default: standard output
  top_k=64               tokens of each label; the others are one outcome
  temperature=1          divides the teacher's logits
  max_rows=N             the first N rows only
  nproc=N parallel.tp=2  any key of the recipe (`zoo show --schema`): the layout doesn't change the result
  packing.mode=none      samples side by side instead of packed
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zoo.cli.arguments import split_flags, split_places
from zoo.errors import UserError

OWN = ("out", "top_k", "temperature", "max_rows")  # keys that are none of a recipe's


def run(arguments: Sequence[str]) -> int:
    """Score rows, and write a line for each, or a teacher's tokens."""
    _, rest = split_flags(arguments, ())
    places, options, overrides = split_places(rest, OWN)
    if len(places) not in (1, 2) or ("top_k" in options and len(places) != 2):
        raise UserError(f"{len(places)} of CHECKPOINT and ROWS given: zoo score CHECKPOINT [ROWS] [key=value ...]")
    path, *rows = places
    write = _write_tokens if "top_k" in options else _write_scores
    return write(path, rows[0] if rows else None, options, overrides)


def _write_scores(path: str, rows: str | None, options: dict[str, str], overrides: list[str]) -> int:
    from zoo.tools.out_file import line_of
    from zoo.tools.score import score

    if "temperature" in options:
        raise UserError("temperature= goes with top_k=, a teacher's tokens; leave it out, or give top_k=64")
    max_rows = _number(options, "max_rows", int) if "max_rows" in options else None
    scores = score(path, rows, overrides, max_rows=max_rows, out=options.get("out"), in_process=True)
    if "out" in options:
        print(f"{len(scores)} rows written to {options['out']}")
    else:
        sys.stdout.write("".join(f"{line_of(row)}\n" for row in scores))
    return 0


def _write_tokens(path: str, rows: str | None, options: dict[str, str], overrides: list[str]) -> int:
    from zoo.tools.top_tokens import top_tokens

    if not options.get("out"):
        raise UserError("top_k= without out=: wanted out=FOLDER, which distill.teacher can name")
    if "max_rows" in options:
        raise UserError("max_rows= with top_k=: a teacher's tokens are of all rows; leave it out")
    top_k, temperature = _number(options, "top_k", int), _number(options, "temperature", float)
    done = top_tokens(path, rows, options["out"], overrides, top_k=top_k, temperature=temperature, in_process=True)
    print(f"{done['rows']:,} rows, {done['labels']:,} labels in {options['out']} ({done['files']} files written now)")
    return 0


def _number[T: (int, float)](options: dict[str, str], key: str, kind: type[T]) -> T:
    text = options.get(key, "1")
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{key}={text}: wanted a number") from None
