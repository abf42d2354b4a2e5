"""Log-probabilities that a checkpoint gives the answers of some rows; `zoo.score`.

The rows go through the same step as in training, packed or not (packing.mode), under any parallel layout. The result depends
on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.checkpoint import initial_weights
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.sample import MicroBatch
from zoo.generation.generator import gather_rows
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model
from zoo.model import build
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.world import World, open_world
from zoo.steps.packed_step import PackedStep
from zoo.tools.asking import AskedRows, asked, check_counts, open_asked, say_left_out
from zoo.tools.out_file import KeptRows, out_file
from zoo.training.evaluation import forward_only, recipe_batches
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@preserve_process_state()
def score(
    path: Model,
    rows: AskedRows = None,
    overrides: Overrides = (),
    *,
    max_rows: int | None = None,
    out: str | Path | None = None,
    in_process: bool = False,
) -> list[JsonObject]:
    """Compute the log-probabilities of the answers in some rows, in separate processes.

    Args:
        path: a checkpoint, as `zoo.evaluate` takes it.
        rows: as `zoo.evaluate` takes them (media paths of dicts from the current folder).
        overrides: overrides of the recipe, such as `parallel.tp=2`, `packing.mode=none` or `packing.budget=16384`.
        max_rows: the first so many rows only.
        out: a file to write the result to, as `zoo.evaluate` takes it.
        in_process: a single rank runs in this process, as in the command `zoo score`.

    Returns:
        One dict per row, in order: `source` (the row's file and line), `token_ids` (L ints), `labels` (L ints, -100 outside of
        answers) and `logprobs` (L floats of 32 bits): at each label the log-probability of that token given the tokens
        before it, and 0.0 elsewhere.

    Raises:
        UserError: no such checkpoint or file, an override that can't run, or a bad row (under data.on_error=raise).
    """
    check_counts(max_rows=max_rows)
    with out_file(out) as file, asked(path, rows, overrides) as recipe:
        most = max_rows or recipe.train.eval_rows or None
        options: JsonObject = {"max_rows": most, "kept": file.kept and str(file.kept)}
        task = "zoo.tools.score:score_here"
        scored: list[JsonObject] = run_task(task, recipe, world_size(recipe), options, fresh=not in_process)
        file.write(scored)
        return scored


@torch.no_grad()
def score_here(recipe: Recipe, options: JsonMapping) -> list[JsonObject]:
    """`score` on this rank, for the rows of data.eval; returns all results on every rank."""
    with open_world(recipe) as world:
        recipe = validate(recipe, world.size)
        assembly = build.assemble(recipe)
        chunks = initial_weights.load_frozen(assembly, recipe, world)
        step = build.build_step(assembly, recipe, world)
        source = open_asked(recipe, assembly.processor, options["max_rows"])
        kept = KeptRows(options.get("kept"), world)
        batches = recipe_batches(recipe, source, world)
        local_scores: dict[int, JsonObject] = {}  # by row number
        for numbers, batch in zip(batches.bins, batches, strict=True):
            logprobs = _logprobs(step, chunks, world, batches.filler() if batch is None else batch)
            if logprobs is not None and step.scores:
                logprobs = -logprobs  # which are scores
            scored: dict[int, JsonObject] = {}
            if batch is not None and logprobs is not None and world.cp_rank == 0:
                rows = by_sample(batch, batch.input_ids, batch.labels, logprobs)
                for number, (ids, labels, values) in zip(numbers, rows, strict=True):
                    labels = torch.cat((labels.new_full((1,), -100), labels[1:]))  # nothing stands before the first
                    scored[number] = {"source": source.rows.name(number), "token_ids": ids.tolist()}
                    scored[number] |= {"labels": labels.tolist(), "logprobs": values.tolist()}
            kept.add(scored)
            local_scores |= scored
        everyone = gather_rows(local_scores, world)
        say_left_out(source, world)
        return list(everyone.values())


def _logprobs(step: PackedStep, chunks: Sequence[MegatronModule], world: World, batch: MicroBatch) -> Tensor | None:
    """(B, T0) log-probabilities on the CPU, on the last pipeline stage; None on the others."""

    def forward(
        data: Iterator[MicroBatch], model: MegatronModule
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        inputs, loss_inputs = step.prepare(next(data), logprobs=True)
        output = step.forward(model, inputs)
        return output, lambda output: (output.sum(), {"logprobs": step.logprobs(output, loss_inputs)})

    results = forward_only(forward, chunks, batch, world)
    return results[0]["logprobs"].float().cpu() if world.counts_loss and results else None


def by_sample(batch: MicroBatch, *tables: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each sample, (L,), out of tables in the batch's shape."""
    flat = [table.flatten() for table in tables]
    spans = zip(batch.starts, batch.lengths, strict=True)
    return [tuple(table[start : start + length] for table in flat) for start, length in spans]
