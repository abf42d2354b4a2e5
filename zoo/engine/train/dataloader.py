"""What a run reads: the rows that it trains on, dealt out in steps, and the held-out ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config.schema import Recipe
from zoo.data.loading.defaults import with_defaults
from zoo.data.loading.evaluation import EvalBatches, eval_batches
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decoder import Decoder
from zoo.data.media.decoding_workers import decoder_for
from zoo.engine.distributed.object_group import peers
from zoo.engine.distributed.world import World
from zoo.engine.model.build import Assembly
from zoo.engine.planning.sample_costs import training_cost


@dataclass(frozen=True)
class Feed:
    """A rank's sources of micro-batches."""

    source: SampleSource
    loader: BatchLoader
    held_out: SampleSource | None  # None: nothing is evaluated
    eval_set: EvalBatches | None
    decoder: Decoder

    @property
    def left_out(self) -> Counter[str]:
        """Rows that were left out, by cause."""
        return self.source.counts + (self.held_out.counts if self.held_out else Counter())

    def close(self) -> None:
        """End its threads and processes."""
        self.loader.close()
        self.decoder.close()


def open_feed(
    recipe: Recipe,
    assembly: Assembly,
    world: World,
    folder: Path,
    tick: Callable[[], None] = lambda: None,
) -> Feed:
    """Open data.train and data.eval as the recipe says; every rank calls it.

    Rows that are left out are listed in bad_rows.jsonl of `folder`, the run's; `tick` is called for each that is read. Raises UserError for data that can't be read.
    """
    data = with_defaults(recipe.data)
    align, cost = recipe.packing.align or 1, training_cost(assembly.config, recipe)
    decoder = decoder_for(recipe.data, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    options: dict[str, Any] = {
        "decoder": decoder,
        "budget": recipe.packing.budget,
        "align": align,
        "tick": tick,
        "bad_rows": folder / "bad_rows.jsonl" if world.is_main else None,
    }
    source = SampleSource.open(
        data.train,
        assembly.processor,
        data,
        augment=data.augment,
        blank=data.blank_answers,
        seed=recipe.run.seed,
        **options,
    )
    loader = BatchLoader(
        source,
        recipe,
        align=align,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        cost=cost,
        group=peers(),
    )
    if not data.eval or recipe.train.eval_rows == 0:
        return Feed(source, loader, None, None, decoder)
    held_out = SampleSource.open(
        data.eval,
        assembly.processor,
        data,
        max_rows=recipe.train.eval_rows,
        evaluation=True,
        **options,
    )
    eval_set = eval_batches(
        held_out,
        mode=recipe.packing.mode,
        budget=recipe.packing.budget,
        micro_batch=recipe.train.micro_batch,
        align=align,
        pad_to=recipe.packing.pad_to,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        cost=cost,
        group=peers(),
    )
    return Feed(source, loader, held_out, eval_set, decoder)
