"""
usage: zoo plan recipe=NAME [key=value ...] [ranks=N] [labels=0.25] [media=0.5] [frames=3.8] [--json]
       zoo plan --table [recipe=NAME] [size=NAME] [hardware=KIND] [key=value ...] [labels=0.25] [media=0.5] [--json]

Shows what a run would take, before anything is launched: parameters by part, memory of a rank by kind, FLOPs by part.
Sizes that hardware= leaves open are chosen as `zoo train` would, so any machine can be planned for on any other.
Exits with 1 where the model does not fit.

  hardware=8xh200    GPUs to plan for: 8xh100 2x8xh200 (nodes, GPUs, kind) 4xa100-40 8x80gb auto cpu; `zoo list` names them
  ranks=16           ranks of the run; default: those of the hardware, or of this machine
  labels=0.25        share of a row's tokens that carry a loss
  media=0.5          share of them that are of images, video and sound
  frames=3.8         frames of speech for each token with a loss, where a talker is trained; default: as spoken at an even pace
  --json             everything, in counts, bytes and FLOPs, for machines
  --table            which published sizes fit 1, 2, 4, 8 and 16 GPUs of a kind (hardware=h200, a100-40, 24gb; default: h100 and
                     h200), with the layout of each; without a recipe those of all families, with all weights and with adapters
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from zoo.cli.arguments import split_flags, split_own_keys, split_recipe, whole_number
from zoo.errors import UserError, printable
from zoo.types import JsonObject

KEYS = ("ranks", "labels", "media", "frames")


def run(arguments: Sequence[str]) -> int:
    """Print the plan; 1 where the model does not fit."""
    flags, rest = split_flags(arguments, ("--json", "--table"))
    values, overrides = split_own_keys(rest, KEYS)
    most = {"labels": 1.0, "media": 1.0, "frames": 1000.0}
    shares: JsonObject = {key: _share(key, values[key], most[key]) for key in most if key in values}
    if "--table" in flags:
        if "ranks" in values:
            raise UserError(f"ranks={printable(values['ranks'], 200)}: --table has 1 to 16 GPUs; leave it out")
        return _print_table(overrides, shares, as_json="--json" in flags)
    name, overrides = split_recipe(overrides, "zoo plan recipe=NAME")

    from zoo.config.compose import load_recipe
    from zoo.planner.plan import plan
    from zoo.planner.report import table

    recipe = load_recipe(name, overrides)
    ranks = whole_number("ranks", values["ranks"]) if "ranks" in values else None
    result = plan(recipe, ranks, **shares)
    print(json.dumps(result.as_dict(), indent=2) if "--json" in flags else table(result))
    return 1 if result.fits is False else 0


def _print_table(arguments: Sequence[str], shares: Mapping[str, float], *, as_json: bool) -> int:
    """Print which sizes fit which GPUs, a line as soon as it is planned."""
    from zoo.tools import fit_table

    recipe, rest = None, list(arguments)
    if any("=" not in text or text.removeprefix("--").startswith(("recipe=", "family=")) for text in rest):
        recipe, rest = split_recipe(rest, "zoo plan --table recipe=NAME")
    values, overrides = split_own_keys(rest, ("size", "hardware"))
    kinds = [fit_table.find_kind(values["hardware"])] if "hardware" in values else fit_table.KINDS
    sizes = fit_table.sizes_of(recipe, values.get("size"))
    lines = (fit_table.line(name, size, kind, overrides, shares) for kind in kinds for name, size in sizes)
    if as_json:
        print(json.dumps([cell.as_dict() for cells in lines for cell in cells], indent=2))
        return 0
    print(fit_table.LEGEND)
    for text in fit_table.text_lines(lines):
        print(text, flush=True)
    return 0


def _share(key: str, text: str, most: float) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= most:
        wanted = "a share between 0 and 1" if most == 1 else f"a number between 0 and {most:g}"
        raise UserError(f"{key}={text}: wanted {wanted}")
    return share
