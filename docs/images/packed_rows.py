"""Draws packed_rows.svg: one step of packed rows of the bundled digits, and the same samples padded, to scale.

    python docs/images/packed_rows.py [key=value ...]

Rows, positions and labels are those that training gets, from the loader and the step of the recipe; overrides are
the recipe's. A budget of 256 tokens, a quarter of the tiny size's, keeps the samples wide enough to read.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import patches
from matplotlib import pyplot as plt

import zoo
from zoo.config.validate import validate
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.model.build import assemble

OUT = Path(__file__).with_name("packed_rows.svg")
BUDGET, ROWS = 256, 3  # tokens of a packed row, packed rows drawn
TEXT, IMAGE, VIDEO, AUDIO, ANSWER, PADDING = range(6)
NAMES = ("prompt text", "image", "video", "sound", "answer (has loss)", "padding")
COLOURS = ("#c3cde0", "#2f74c0", "#159a7c", "#ee9b1c", "#8a3ea8", "#ececef")
INK, QUIET, FAINT, PAPER = "#1d2433", "#6b7385", "#d4d8e0", "#ffffff"
TIME, SPACE = "#d1345b", "#9aa3b5"  # curves of the position ids
BAR, GAP, CURVE, PITCH, LINE = 0.8, 0.38, 0.75, 2.9, 0.44  # heights; PITCH: packed rows, LINE: padded rows
HEADING = {"fontsize": 12.5, "weight": "bold", "va": "center"}
NOTE = {"fontsize": 9.5, "color": QUIET, "ha": "right", "va": "center"}
matplotlib.rcParams.update({"svg.hashsalt": "zoo", "font.size": 9, "text.color": INK, "hatch.linewidth": 0.5})


def step_of_every_kind(overrides: list[str]) -> tuple[Any, list[Any]]:
    """The family's step, and the micro-batches of the first optimizer step that shows every kind of row."""
    given = ["size=tiny", f"packing.budget={BUDGET}", f"train.global_batch={ROWS}", *overrides]
    recipe = validate(zoo.load_recipe("qwen3_omni_sft", given), 1)
    parts = assemble(recipe)
    source = SampleSource.open(recipe.data.train, parts.processor, recipe.data, budget=recipe.packing.budget)
    loader = BatchLoader(source, recipe, prefetch=False)
    kinds = {row.kind for row in source.rows}
    while True:
        batches = loader.next_step()
        if {kind for batch in batches for kind in batch.kinds} == kinds:
            return parts.family.load("step")(parts.config, recipe.packing, "cpu"), batches


def token_classes(step: Any, batch: Any) -> torch.Tensor:
    """(1, T) what each token of a packed row is: an index of NAMES."""
    classes = torch.full_like(batch.input_ids, TEXT)
    for value, name in ((IMAGE, "image"), (VIDEO, "video"), (AUDIO, "audio")):
        classes[batch.input_ids == getattr(step.config.thinker, f"{name}_token_id")] = value
    classes[batch.labels >= 0] = ANSWER
    return classes.masked_fill(batch.layout.padding_mask, PADDING)


def draw_tokens(axis: Any, classes: list[int], x: float, y: float, height: float) -> None:
    """Tokens from `x` on, one block for each run of the same class, and a frame around the real ones."""
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(classes)) + 1), len(classes)]):
        hatch = "////" if classes[start] == PADDING else None
        style = {"facecolor": COLOURS[classes[start]], "linewidth": 0, "hatch": hatch, "edgecolor": "#c3c6ce"}
        axis.add_patch(patches.Rectangle((x + start, y), end - start, height, **style))
    real = sum(kind != PADDING for kind in classes)
    for colour, width in ((PAPER, 2.2), (INK, 0.7)):
        axis.add_patch(patches.Rectangle((x, y), real, height, fill=False, edgecolor=colour, linewidth=width))


def draw_packed(axis: Any, step: Any, batch: Any, first: int, y: float) -> None:
    """One packed row at height `y`, its samples counted from `first`, and its positions beneath."""
    positions = step.pack(batch, batch.layout).positions[:, 0]  # (3, T): time, height, width
    scale, floor, start = CURVE / float(positions.max()), y + BAR + GAP + CURVE, 0
    pieces = token_classes(step, batch)[0].split(list(batch.layout.padded_lengths))
    for number, (kind, piece) in enumerate(zip(batch.kinds, pieces, strict=True), start=first):
        draw_tokens(axis, piece.tolist(), start, y, BAR)
        end, middle = start + len(piece), start + len(piece) / 2
        name = {"multi_image": "images", "multi_audio": "sounds", "audio_in_video": "video with its sound"}.get(
            kind, kind
        )
        axis.text(middle, y - 0.5, number, ha="center", va="center", weight="bold")
        axis.text(middle, y - 0.2, name, ha="center", va="center", fontsize=7.5, color=QUIET)
        x = np.arange(start, end) + 0.5
        for which, colour, width in ((2, SPACE, 0.8), (1, SPACE, 0.8), (0, TIME, 1.1)):
            axis.plot(x, floor - positions[which, start:end] * scale, color=colour, linewidth=width)
        axis.plot([start + 0.4, end - 0.4], [floor, floor], color=FAINT, linewidth=0.7, zorder=0)
        last = float(positions[:, end - 1].max())
        place = {"ha": "right", "va": "bottom", "fontsize": 6.5, "color": TIME}
        axis.text(end - 0.6, floor - last * scale - 0.05, f"{last:.0f}", **place)
        start = end
    axis.text(-2.5, y + BAR / 2, f"{start} tokens", ha="right", va="center")
    axis.text(-2.5, floor - CURVE / 2, "positions", ha="right", va="center", color=TIME)


def draw_padded(axis: Any, step: Any, batch: Any, first: int, x: float, y: float) -> int:
    """The same samples as a padded batch, its left end at `x`; returns its width in tokens."""
    rows = batch.layout.unpack(token_classes(step, batch), fill=PADDING)
    for number, row in enumerate(rows.tolist()):
        draw_tokens(axis, row, x, y + number * LINE, LINE * 0.86)
        axis.text(x - 1, y + (number + 0.43) * LINE, first + number, ha="right", va="center", fontsize=7)
    return rows.shape[1]


def draw_legend(axis: Any, x: float, y: float) -> None:
    """What the colours mean, its upper left corner at (x, y)."""
    pairs = zip(COLOURS, NAMES, strict=True)
    handles: list[Any] = [patches.Patch(facecolor=c, label=n, edgecolor="#c3c6ce", linewidth=0) for c, n in pairs]
    handles[PADDING].set_hatch("////")
    for colour, name in ((TIME, "position: time"), (SPACE, "position: height, width")):
        handles.append(plt.Line2D([], [], color=colour, linewidth=1.1, label=name))
    place = {"loc": "upper left", "bbox_to_anchor": (x, y), "bbox_transform": axis.transData}
    axis.legend(handles=handles, frameon=False, fontsize=9.5, labelspacing=0.7, handlelength=1.6, **place)


def main() -> None:
    """Draw and write the picture."""
    step, batches = step_of_every_kind(sys.argv[1:])
    counts = [len(batch.lengths) for batch in batches]
    figure, axis = plt.subplots(figsize=(12, 8.9), facecolor=PAPER)
    lower, first, x, slots = 1.45 + ROWS * PITCH, 1, 0, 0
    for number, batch in enumerate(batches):
        draw_packed(axis, step, batch, first, 1.2 + number * PITCH)
        width = draw_padded(axis, step, batch, first, x, lower + 0.6)
        first, x, slots = first + counts[number], x + width + 9, slots + width * counts[number]
    real, total = (sum(getattr(batch, name) for batch in batches) for name in ("real_tokens", "total"))
    axis.text(0, 0, f"Packed: {sum(counts)} samples in {ROWS} rows, {1 - real / total:.0%} padding", **HEADING)
    axis.text(BUDGET, 0, "attention and position ids start anew in every sample", **NOTE)
    padded = f"Padded: the same samples in {ROWS} batches, {1 - real / slots:.0%} padding"
    axis.text(0, lower, padded, **HEADING)
    axis.text(BUDGET, lower, "every row is as wide as the longest one of its batch", **NOTE)
    axis.set(xlim=(-22, BUDGET + 2), ylim=(lower + 0.8 + max(counts) * LINE, -0.5))
    axis.set_axis_off()
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    draw_legend(axis, x + 8, lower + 0.35)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
