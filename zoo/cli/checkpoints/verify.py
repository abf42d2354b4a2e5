"""
usage: zoo verify A B [rows=FILE] [key=value ...] [--json]
       zoo verify A [EXPORT] served=vllm [rows=FILE] [key=value ...] [--json]

Compares two checkpoints, each a Hugging Face folder or hub id, zoo's own weights, or the folder or checkpoint of a run:
every tensor (equal, largest difference, missing) and, with rows=FILE (a JSONL file, or a bundled set such as
digits:heldout), the log-probability of every token of the answers, those of a Hugging Face folder by transformers.
Exits with 1 where something differs.

  rows=FILE          also compare log-probabilities on these rows
  tolerance=1e-3     largest difference of a log-probability that passes
  packing.mode=none  any key of the recipe under which zoo computes them
  --json             everything, for machines

With served= it starts a server of EXPORT (A's own export where that is left out; a folder of adapters beside what they belong to),
sends it the rows as a client does, media and answers included, and compares its token ids and log-probabilities with those of A by
zoo. Rows are as for `zoo score`.

  served=vllm        the server's program: a name on PATH, or the path of one in another environment; or http://host:port,
                     a running server. With served=transformers greedy answers are compared
  limit=0.5          largest difference of a log-probability that passes; their mean may be a tenth of it. Default: 1e-3 for an
                     export in fp32, 0.1 in fp16, 0.5 in bf16, 1 in FP8
  max_rows=N         the first N rows only
  served_model=NAME  what a running server calls the model, where it has several
  server_args='--max-model-len 16384 --tensor-parallel-size 2'  further arguments of `vllm serve`
  server_log=FILE    where the server's log goes; default: a file in the temporary folder, which stays
  server_seconds=N   longest wait until it answers (1800)
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_own_keys, split_places, whole_number
from zoo.errors import UserError, printable

if TYPE_CHECKING:
    from zoo.tools.serving.comparison import ServedVerification
    from zoo.tools.verify import Verification
    from zoo.types import JsonObject

_SHOWN = 20
_SERVED = ("served", "limit", "max_rows", "served_model", "server_args", "server_log", "server_seconds")


def run(arguments: Sequence[str]) -> int:
    """Compare, print what was found; 1 where something differs."""
    flags, rest = split_flags(arguments, ("--json",))
    if any(argument.removeprefix("--").startswith("served=") for argument in rest):
        return _run_served(rest, "--json" in flags)
    places = [argument for argument in rest if "=" not in argument or Path(argument).exists()]
    if len(places) != 2:
        raise UserError(f"{len(places)} of A and B given: zoo verify A B [rows=FILE] [key=value ...]")
    options = [argument.removeprefix("--") for argument in rest if argument not in places]
    settings, overrides = split_own_keys(options, ("rows", "tolerance"))

    if "tolerance" in settings and "rows" not in settings:
        raise UserError(
            "tolerance= goes with rows=, whose log-probabilities it bounds; leave it out, or give rows=FILE"
        )

    from zoo.tools.verify import LOGPROBS, verify

    a, b = places
    tolerance = _number("tolerance", settings["tolerance"]) if "tolerance" in settings else LOGPROBS
    verification = verify(
        a, b, rows=settings.get("rows"), overrides=overrides, tolerance=tolerance, in_process=True, quiet=False
    )
    print(json.dumps(verification.as_dict(), indent=2) if "--json" in flags else table(verification))
    return 0 if verification.equal else 1


def _run_served(arguments: Sequence[str], as_json: bool) -> int:
    """Compare with a server, print what differs; 1 where it is more than the limit."""
    settings, rest = split_own_keys(arguments, (*_SERVED, "rows"))
    places, _, overrides = split_places(rest, ())
    if len(places) not in (1, 2):
        raise UserError(
            f"{len(places)} of A and EXPORT given: zoo verify A [EXPORT] served=vllm [rows=FILE] [key=value ...]"
        )

    from zoo.tools.serving.comparison import verify_served
    from zoo.tools.serving.server import START_SECONDS

    limit, seconds = (_number(key, settings[key]) if key in settings else None for key in ("limit", "server_seconds"))
    verification = verify_served(
        *places,
        served=settings["served"],
        rows=settings.get("rows"),
        overrides=overrides,
        limit=limit,
        max_rows=whole_number("max_rows", settings["max_rows"]) if "max_rows" in settings else None,
        served_model=settings.get("served_model"),
        server_args=shlex.split(settings.get("server_args", "")),
        server_log=settings.get("server_log"),
        server_seconds=START_SECONDS if seconds is None else seconds,
        quiet=False,
    )
    print(json.dumps(verification.as_dict(), indent=2) if as_json else served_table(verification))
    return 0 if verification.equal else 1


def served_table(verification: ServedVerification) -> str:
    """Rows that the server reads otherwise, and how far its log-probabilities differ."""
    lines = [f"server: {verification.server}"]
    differing = verification.rows_with("ids_differ")
    for row in differing[:_SHOWN]:
        ids = row["ids_differ"]
        sides = (
            f"{side} {ids[side]} {ids[f'{side}_text']!r} of {ids[f'{side}_length']} tokens"
            for side in ("zoo", "server")
        )
        lines.append(f"{row['source']}: other token ids from position {ids['position']}: {', '.join(sides)}")
    refused = verification.rows_with("refused")
    lines += [f"{row['source']}: the server refuses it: {row['refused']}" for row in refused[:_SHOWN]]
    hidden = max(len(differing) - _SHOWN, 0) + max(len(refused) - _SHOWN, 0)
    lines += [f"... and {hidden} more"] if hidden else []
    reasons = Counter(row["skipped"] for row in verification.rows_with("skipped"))
    lines += [f"{count} rows are not compared: {reason}" for reason, count in reasons.items()]
    compared = verification.rows_with("differences")
    answers = [(row["source"], row["answers"]) for row in verification.rows_with("answers")]
    if answers:
        others = [(source, both) for source, both in answers if both["zoo"] != both["server"]]
        lines += [
            f"{source}: zoo answers {both['zoo']!r}, the server {both['server']!r}" for source, both in others[:_SHOWN]
        ]
        lines.append(
            f"{len(answers)} {verification.quantity}, as this server has no log-probabilities of prompts: {len(others)} differ, {len(refused)} refused"
        )
    else:
        lines.append(
            f"{len(verification.rows)} rows: {len(compared)} with the same token ids, {len(differing)} with others, {len(refused)} refused"
        )
    lines += _differences(verification)
    odd = [f"{row['source']} ({', '.join(row['read_otherwise'])})" for row in verification.rows_with("read_otherwise")]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        lines.append(f"images that servers read in ways of their own: {', '.join(odd[:_SHOWN])}{more}")
    lines.append("equal" if verification.equal else "DIFFERENT")
    return "\n".join(lines)


def _differences(verification: ServedVerification) -> list[str]:
    """How far the server's numbers differ: each row over the limit, then all together."""
    worst = verification.worst_row
    if worst is None:
        return []
    over = verification.rows_over_limit
    lines = [
        f"{row['source']}: {sum(abs(value) > verification.limit for value in row['differences'])} of {len(row['differences'])} "
        f"over the limit, {_at(row['worst'])}"
        for row in over[:_SHOWN]
    ]
    lines += [f"... and {len(over) - _SHOWN} more rows over the limit"] if len(over) > _SHOWN else []
    percentiles = ", ".join(f"{percent} % within {value:.1e}" for percent, value in verification.percentiles.items())
    lines.append(
        f"{len(verification.differences)} {verification.quantity}: mean difference {verification.mean_difference:.2e}, {percentiles}, "
        f"largest {verification.largest_difference:.2e} (limit {verification.limit:g}, of the mean a tenth)"
    )
    return [*lines, f"largest at {worst['source']}, {_at(worst['worst'])}"]


def _at(token: JsonObject) -> str:
    return f"position {token['position']}, {token['token']!r}: zoo {token['zoo']:.4f}, server {token['server']:.4f}"


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{key}={printable(text, 200)}: wanted a number from 0, such as 1e-3") from None


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
