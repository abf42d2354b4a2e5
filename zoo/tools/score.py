"""Log-probabilities that a checkpoint gives the answers of some rows; `zoo.score`.

The rows go through the same step as in training, packed or not (packing.mode), under any parallel layout. The result depends
on neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.checkpoint import initial_weights
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.evaluation import EvalBatches
from zoo.data.loading.sample_source import SampleSource
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging.result import Model
from zoo.model import build
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.world import World, open_world
from zoo.tools.asking import Rows, asked, check_counts
from zoo.tools.out_file import KeptRows, out_file
from zoo.training.evaluation import forward_only, recipe_batches


@preserve_process_state()
def score(
    path: Model,
    rows: Rows = None,
    overrides: Overrides = (),
    *,
    max_rows: int | None = None,
    out: str | Path | None = None,
    here: bool = False,
) -> list[dict[str, Any]]:
    """Compute the log-probabilities of the answers in some rows, in separate processes.

    Args:
        path: a Hugging Face folder or hub id, zoo's own weights, the folder or checkpoint of a run, or what names a run: its `TrainResult`,
            recipe, or recipe's name or file.
        rows: as `zoo.evaluate` takes them (media paths of dicts from the current folder).
        overrides: overrides of the recipe, such as `parallel.tp=2`, `packing.mode=none` or `packing.budget=16384`.
        max_rows: the first so many rows only.
        out: a file to write the result to, one JSON object a line; a failed call leaves the former file, and says where rows are
            that were done.
        here: a single rank runs in this process, as in the command `zoo score`.

    Returns:
        One dict per row, in order: `source` (the row's file and line), `token_ids` (L ints), `labels` (L ints, -100 outside of
        answers) and `logprobs` (L floats of 32 bits): at each label the log-probability of that token given the tokens
        before it, and 0.0 elsewhere.

    Raises:
        UserError: no such checkpoint or file, an override that can't run, or a bad row (under data.on_error=raise).
    """
    check_counts(max_rows=max_rows)
    with out_file(out) as file, asked(path, rows, overrides) as recipe:
        options: dict[str, Any] = {"max_rows": max_rows or recipe.train.eval_rows or None}
        options["kept"] = file.kept and str(file.kept)
        task = "zoo.tools.score:score_here"
        found: list[dict[str, Any]] = run_task(task, recipe, world_size(recipe), options, fresh=not here)
        file.write(found)
        return found


@torch.no_grad()
def score_here(recipe: Recipe, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`score` on this rank, for the rows of data.eval; returns all results on every rank."""
    with open_world(recipe) as here:
        recipe = validate(recipe, here.size)
        assembly = build.assemble(recipe)
        chunks = build.build_model(assembly, recipe, here)
        initial_weights.init_weights(chunks, assembly, recipe, here)
        for chunk in chunks:
            chunk.eval()
        step = build.build_step(assembly, recipe, here)
        source = SampleSource.open(
            recipe.data.eval,
            assembly.processor,
            recipe.data,
            max_rows=options["max_rows"],
            evaluation=True,
            budget=recipe.packing.budget,
            align=recipe.packing.align or 1,
        )
        kept = KeptRows(options.get("kept"), here)
        mine = _Scorer(step, chunks, here, kept).run(recipe_batches(recipe, source, here))
        return _gather(mine, source, here)


@dataclass
class _Scorer:
    """Computes log-probabilities with a model on this rank."""

    step: Any
    chunks: Sequence[Any]
    here: World
    kept: KeptRows

    def run(self, batches: EvalBatches) -> dict[int, dict[str, Any]]:
        """The results of this rank's rows, by row number."""
        found: dict[int, dict[str, Any]] = {}
        for indices, batch in zip(batches.bins, batches, strict=True):
            given = batch if batch is not None else batches.spare()
            logprobs = self._forward(given)
            new: dict[int, dict[str, Any]] = {}
            if batch is not None and logprobs is not None and self.here.cp_rank == 0:
                rows = by_sample(given, given.input_ids, given.labels, logprobs)
                for index, (ids, labels, values) in zip(indices, rows, strict=True):
                    labels = torch.cat((labels.new_full((1,), -100), labels[1:]))  # nothing stands before the first
                    new[index] = {
                        "source": batches.source.rows.name(index),
                        "token_ids": ids.tolist(),
                        "labels": labels.tolist(),
                        "logprobs": values.tolist(),
                    }
            self.kept.add(new)
            found |= new
        return found

    def _forward(self, batch: Any) -> Tensor | None:
        """(B, T0) log-probabilities on the host, on the last pipeline stage; None on the others."""

        def forward(data: Iterator[Any], model: Any) -> Any:
            inputs, loss_inputs = self.step.prepare(next(data), logprobs=True)
            output = self.step.forward(model, inputs)
            return output, lambda output: (output.sum(), {"logprobs": self.step.logprobs(output, loss_inputs)})

        results = forward_only(forward, self.chunks, batch, self.here)
        return results[0]["logprobs"].float().cpu() if self.here.counts_loss and results else None


def by_sample(batch: Any, *tables: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each sample, (L,), out of tables in the batch's shape."""
    flat = [table.flatten() for table in tables]
    spans = zip(batch.starts, batch.lengths, strict=True)
    return [tuple(table[start : start + length] for table in flat) for start, length in spans]


def _gather(mine: dict[int, dict[str, Any]], source: SampleSource, here: World) -> list[dict[str, Any]]:
    everyone: list[dict[int, dict[str, Any]]] = [{} for _ in range(here.size)]
    dist.all_gather_object(everyone, mine)
    found = {index: row for of_rank in everyone for index, row in of_rank.items()}
    if source.counts and here.is_main:
        print(f"rows left out: {source.bad_rows.summary()}", file=sys.stderr)
    return [found[index] for index in sorted(found)]
