"""
usage: zoo verify A B [rows=FILE] [key=value ...] [--json]

Compares two checkpoints, each a Hugging Face folder or hub id, zoo's own weights, or the folder or checkpoint of a run:
every tensor (equal, largest difference, missing) and, with rows=FILE (a JSONL file, or a bundled set such as
digits:heldout), the log-probability of every token of the answers, those of a Hugging Face folder by transformers.
Exits with 1 where something differs.

  rows=FILE          also compare log-probabilities on these rows
  tolerance=1e-3     largest difference of a log-probability that passes
  packing.mode=none  any key of the recipe under which zoo computes them
  --json             everything, for machines
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_own_keys
from zoo.errors import UserError, printable

if TYPE_CHECKING:
    from zoo.tools.verify import Verification

_SHOWN = 20


def run(arguments: Sequence[str]) -> int:
    """Compare, print what was found; 1 where something differs."""
    flags, rest = split_flags(arguments, ("--json",))
    places = [argument for argument in rest if "=" not in argument or Path(argument).exists()]
    if len(places) != 2:
        raise UserError(f"{len(places)} of A and B given: zoo verify A B [rows=FILE] [key=value ...]")
    options = [argument.removeprefix("--") for argument in rest if argument not in places]
    settings, overrides = split_own_keys(options, ("rows", "tolerance"))

    from zoo.tools.verify import LOGPROBS, verify

    a, b = places
    tolerance = _number(settings["tolerance"]) if "tolerance" in settings else LOGPROBS
    verification = verify(
        a, b, rows=settings.get("rows"), overrides=overrides, tolerance=tolerance, in_process=True, quiet=False
    )
    print(json.dumps(verification.as_dict(), indent=2) if "--json" in flags else table(verification))
    return 0 if verification.equal else 1


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"tolerance={printable(text, 200)}: wanted a number from 0, such as 1e-3") from None


def table(verification: Verification) -> str:
    """The differences, and how many there are."""
    bad = [tensor for tensor in verification.tensors if tensor.status != "equal"]
    lines = []
    if bad:
        width = max(len(tensor.name) for tensor in bad[:_SHOWN])
        lines.append(f"{'tensor':<{width}}  {'status':<12}  {'max difference':>14}  shapes")
    for tensor in bad[:_SHOWN]:
        difference = "" if tensor.max_difference is None else f"{tensor.max_difference:.3e}"
        shapes = " | ".join("-" if shape is None else str(list(shape)) for shape in tensor.shapes)
        shown = "" if tensor.shapes == (None, None) else shapes
        lines.append(f"{tensor.name:<{width}}  {tensor.status:<12}  {difference:>14}  {shown}".rstrip())
    if len(bad) > _SHOWN:
        lines.append(f"... and {len(bad) - _SHOWN} more")
    counts = ", ".join(f"{count} {status}" for status, count in sorted(verification.counts.items()))
    lines.append(f"{len(verification.tensors)} tensors: {counts}")
    casts = sum(len(set(tensor.dtypes)) > 1 for tensor in verification.tensors)
    if casts:
        lines.append(f"{casts} of them in two dtypes, of the same values where they are equal")
    if verification.rows:
        labels = sum(row["labels"] for row in verification.compared_rows)
        reasons = Counter(row["skipped"] for row in verification.rows if row["skipped"])
        lines += [f"{count} rows are not compared: {reason}" for reason, count in reasons.items()]
        lines.append(
            f"{len(verification.compared_rows)} rows, {labels} log-probabilities: largest difference {verification.largest_difference:.3e} "
            f"(tolerance {verification.tolerance:g})"
        )
    lines.append("equal" if verification.equal else "DIFFERENT")
    return "\n".join(lines)
