"""
usage: zoo inspect recipe=NAME [key=value ...] [out=FOLDER] [rows=4] [samples=1000] [budgets=4096,8192] [--json]
       zoo inspect RUN step=N [out=FOLDER] [samples=1000] [budgets=4096,8192] [--json]

Shows real packed rows of a recipe's data as training gets them: segments, media, labels, padding and position ids, as a
picture (rows.png) and as a page (rows.html) that has every sample's text. Prints how long samples are, and how much of a
row is expected to stay empty under several budgets.

With a run folder and the number of a bad step (or the step's file, RUN/bad_steps/step_N.json) it shows the rows of exactly
that step, packed again, with the rank and the loss of each and where their samples stand.

  out=FOLDER           where both files go; default: the run folder's `inspect`, of a step `inspect/step_N`
  rows=4               rows that are drawn
  samples=1000         most samples that are read for the statistics, evenly over all rows of the data
  budgets=4096,8192    budgets that are tried; default: a quarter of the recipe's to four times as much
  --json               the statistics, for machines
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.arguments import split_flags, split_own_keys, split_recipe, whole_number
from zoo.errors import UserError

if TYPE_CHECKING:
    from zoo.tools.inspection.lengths import Lengths
    from zoo.tools.inspection.replay import Step

KEYS = ("out", "rows", "samples", "budgets")


def run(arguments: Sequence[str]) -> int:
    """Write picture and page, and print the statistics."""
    flags, rest = split_flags(arguments, ("--json",))
    values, others = split_own_keys(rest, KEYS)
    count, most = (whole_number(key, values.get(key, default)) for key, default in (("rows", "4"), ("samples", "1000")))
    budgets = tuple(whole_number("budgets", text) for text in values.get("budgets", "").split(",") if text)
    step = _step(others)
    if step is None:
        name, overrides = split_recipe(others, "zoo inspect recipe=NAME, or zoo inspect RUN step=N")
    else:
        name, overrides = str(step.run_dir / "config.yaml"), []

    from zoo.checkpoint.selection import repaired_source
    from zoo.config.compose import load_recipe
    from zoo.config.derived import alignment
    from zoo.config.validate import validate
    from zoo.model.build import assemble
    from zoo.tools.inspection.drawing import draw, draw_speech, write_page
    from zoo.tools.inspection.lengths import lengths_of
    from zoo.tools.inspection.replay import replayed
    from zoo.tools.inspection.replay import table as table_of_step
    from zoo.tools.inspection.rows import packed_rows

    recipe = load_recipe(name, overrides)
    align = recipe.packing.align or alignment(recipe)
    alone = {**dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp"), 1), "sp": False, "stage_layers": [], "plan": []}
    recipe = validate(recipe.replace({"parallel": alone, "packing.align": align}), 1)
    assembly = assemble(recipe, repaired_source(recipe))
    lengths = lengths_of(recipe, assembly, most, budgets)
    if step is None:
        rows = packed_rows(recipe, assembly, count)
        title = f"{recipe.recipe} {recipe.size or ''}: {len(rows)} rows at packing.budget={recipe.packing.budget}"
        folder = Path(values.get("out", f"{recipe.run.dir}/inspect"))
    else:
        rows, title = replayed(step, recipe, assembly), step.title
        folder = Path(values.get("out", step.run_dir / "inspect" / f"step_{step.number}"))
    drawing = draw(rows, lengths, title, folder / "rows.png")
    page = write_page(rows, lengths, title, drawing.name, folder / "rows.html")
    speech = draw_speech(rows, folder / "speech.png")
    if "--json" in flags:
        statistics = {"picture": str(drawing), "page": str(page), **lengths.as_dict()}
        if speech is not None:
            statistics["speech"] = str(speech)
        if step is not None:
            statistics["step"] = {key: value for key, value in step.record.items() if key != "data"}
        print(json.dumps(statistics, indent=2))
    else:
        print(
            f"{table(lengths) if step is None else table_of_step(step)}\n{drawing}\n{page}{'' if speech is None else f'\n{speech}'}"
        )
    return 0


def _step(arguments: Sequence[str]) -> Step | None:
    """The bad step that `RUN step=N` or a step's file names; None where a recipe is meant."""
    places = [text for text in arguments if "=" not in text]
    number = next((text for text in arguments if text.removeprefix("--").startswith("step=")), None)
    if number is None and not (len(places) == 1 and places[0].endswith(".json")):
        return None
    over = [text for text in arguments if text not in (number, *places[:1])]
    if over or not places:
        raise UserError(f"{over[0] if over else number}: a step is shown by zoo inspect RUN step=N, and as it was")

    from zoo.tools.inspection.replay import Step

    path = Path(places[0])
    return Step.read(path, None if number is None else whole_number("step", number.partition("=")[2]))


def table(lengths: Lengths) -> str:
    """The statistics in a few lines."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in lengths.kinds.items())
    media = "".join(f", {share:.1%} {kind}" for kind, share in lengths.media.items() if share)
    lines = [
        f"{lengths.samples} samples: {kinds} (rows left out: {lengths.left_out})",
        "tokens a sample  " + "  ".join(f"{name} {value:.0f}" for name, value in lengths.tokens.items()),
        f"of all tokens    {lengths.labels:.1%} with a loss{media}",
        "",
        "budget    rows  samples a row  left empty  alignment  side by side  too long",
    ]
    for f in lengths.fillings:
        lines.append(
            f"{f.budget:>6} {f.rows:>7} {f.samples_a_row:>14.1f} {f.unfilled:>11.2%} {f.alignment:>10.2%} "
            f"{f.side_by_side:>13.1%} {f.too_long:>9}"
        )
    return "\n".join(lines)
