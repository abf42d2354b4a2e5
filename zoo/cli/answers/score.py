"""
usage: zoo score CHECKPOINT ROWS [key=value ...]

Writes, for each row of a JSONL file (or a bundled set such as digits:heldout), the log-probabilities that a checkpoint
gives the tokens of its answers: one JSON object a line with source, token_ids, labels and logprobs (0.0 where there is
no label). CHECKPOINT is a Hugging Face folder or hub id, zoo's own weights, or the folder or checkpoint of a run.

  out=FILE               where to write; default: standard output
  nproc=N parallel.tp=2  any key of the recipe (`zoo show --schema`): the layout doesn't change the result
  packing.mode=none      samples side by side instead of packed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.cli.arguments import split_flags
from zoo.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Score, and write a line a row."""
    _, rest = split_flags(arguments, ())
    named = [argument.removeprefix("--") for argument in rest]
    rest = [
        one.removeprefix("rows=") if one.startswith("rows=") else one for one in named
    ]  # as zoo verify has it
    places = [argument for argument in rest if "=" not in argument or Path(argument).exists()]
    if len(places) != 2:
        raise UserError(
            f"{len(places)} of CHECKPOINT and ROWS given: zoo score CHECKPOINT ROWS [key=value ...]"
        )
    given = [argument for argument in rest if argument not in places]
    out = [argument.partition("=")[2] for argument in given if argument.startswith("out=")]

    from zoo.engine.launch.launcher import WorkerError
    from zoo.engine.tools.score import score

    try:
        path, file = places
        overrides = [argument for argument in given if not argument.startswith("out=")]
        rows = score(path, file, overrides, here=True)
    except WorkerError as error:
        if error.code != 2:  # a user's mistake has been printed already
            print(f"zoo: {error.line}", file=sys.stderr)
        return error.code
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    if out:
        Path(out[-1]).write_text(text, encoding="utf-8")
        print(f"{len(rows)} rows written to {out[-1]}")
    else:
        sys.stdout.write(text)
    return 0
