"""The data of a run: the rows that it trains on, distributed over steps and ranks, and the held-out rows."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zoo.config.checks.training import check_schedule
from zoo.config.derived import teacher_on_disk
from zoo.config.schema import Recipe, TrainConfig
from zoo.data.errors import RowError
from zoo.data.loading import worker_processes
from zoo.data.loading.defaults import with_defaults
from zoo.data.loading.evaluation import EvalBatches
from zoo.data.loading.lengths import EXACT_ROWS, LENGTH_PROBES
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decoder import Decoder
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.sample import MicroBatch
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.row_set import spread
from zoo.errors import ConfigError, UserError
from zoo.generation.prompts import most_positions
from zoo.logging import terminal
from zoo.model.build import Assembly
from zoo.parallel.object_group import agreed, object_group
from zoo.parallel.world import World
from zoo.planner.sample_costs import training_cost
from zoo.rollouts.loader import RolloutLoader
from zoo.training.distillation.token_files import TokenReader
from zoo.training.evaluation import recipe_batches
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from zoo.steps.packed_step import Prepared
    from zoo.training.towers.dealt_media import Item

LABEL_PROBES = 64  # rows one of which is to have a label before a run begins


class RowCounter:
    """Called for each row that is measured or encoded: passes it on as a sign of life, and shows on a terminal how many there were."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self.read = self.expected = 0  # rows so far, and rows after the work that is being done

    def __call__(self) -> None:
        self._tick()
        self.read += 1
        expected = f" of {self.expected:,}" if self.read <= self.expected else ""
        terminal.detail(f"{self.read:,}{expected} rows")


@dataclass(frozen=True)
class RunData:
    """A rank's samples and loader, and its held-out rows."""

    source: SampleSource
    loader: BatchLoader | RolloutLoader
    held_out: SampleSource | None  # None: nothing is evaluated
    eval_set: EvalBatches | None
    decoder: Decoder
    rows_read: RowCounter

    @property
    def left_out(self) -> Counter[str]:
        """Rows that were left out, by cause."""
        return self.source.counts + (self.held_out.counts if self.held_out else Counter())

    @property
    def shrunk(self) -> int:
        """Rows whose images or videos were made smaller to fit (data.overlong=shrink)."""
        return self.source.shrunk + (self.held_out.shrunk if self.held_out else 0)

    def abandon(self) -> None:
        """Have the loader's thread leave off at the next row: a run that has failed need not wait until a step is prepared."""
        self.loader.abandon()

    def close(self) -> None:
        """End the threads and processes of loader and decoder."""
        self.loader.close()
        self.decoder.close()


@dataclass(frozen=True)
class StepBatches:
    """A step's micro-batches on this rank."""

    micro_batches: list[MicroBatch]
    prepared: Prepared | None  # the first one on the device; None where auxiliary passes come before
    data_position: JsonObject  # the loader's state before them
    seconds: float  # that the loader was waited for
    total_steps: int | None  # steps of the run, by what the loader knew with this one; None: it does not say
    metrics: JsonMapping  # of the loader's own
    dealt: list[list[Item]] | None = None  # media of each, where ranks share their towers' work (parallel.towers)


def total_steps(train: TrainConfig, loader: BatchLoader | RolloutLoader, rows_read: RowCounter | None = None) -> int:
    """`train.steps`, or what `train.epochs` comes to from the loader's position.

    Sets `rows_read.expected` to the number of rows that this reads at most.

    Raises:
        ConfigError: the steps are too few for the schedule.
    """
    steps = train.steps
    if steps is None:
        if rows_read is not None and isinstance(loader, BatchLoader):
            measured = LENGTH_PROBES if len(loader.source) > EXACT_ROWS else len(loader.source)
            rows_read.expected = rows_read.read + measured // loader.lengths.group.size
        terminal.set_status("reading lengths")
        steps = loader.steps_for_epochs(train.epochs or 1.0)
    check_schedule(train, steps)
    return steps


def refuse_unlabelled(source: SampleSource, recipe: Recipe) -> None:
    """Raises UserError where none of LABEL_PROBES rows has a token to learn; every rank calls it.

    The rows of a table are spread over all of it, and read up to the first one that has such a token.
    """

    def probe() -> None:
        names: list[str] = []
        if source.rows.has_stream:
            ids = source.rows.order(0, recipe.run.seed, recipe.data.shuffle)[:LABEL_PROBES].tolist()
        else:
            ids = spread(len(source), LABEL_PROBES)
        for sample_id in map(SampleId, ids):
            with contextlib.suppress(RowError):  # follows data.on_error when its turn comes
                if source.encode(sample_id).num_labels:
                    return
                names.append(source.rows.name(sample_id))
        if names:
            raise UserError(
                f"data.train: {len(names)} rows have been looked at ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''}), and none has a "
                f"token to learn: wanted rows with an answer (role assistant) that data.labels={recipe.data.labels} and weights of "
                "messages leave in; zoo inspect shows what is learnt, and rows of query and positive want train.loss=embed"
            )

    if source.rows.has_stream:  # each rank reads its own
        probe()
    else:
        agreed(probe)


def open_data(
    recipe: Recipe, assembly: Assembly, world: World, folder: Path, tick: Callable[[], None] = lambda: None
) -> RunData:
    """Open data.train and data.eval as the recipe says; every rank calls it.

    Raises UserError for data that can't be read.

    Args:
        folder: the run folder, whose bad_rows.jsonl lists the rows that are left out.
        tick: called for each row that is read.
    """
    settings = with_defaults(recipe.data)
    if (recipe.train.preference or recipe.train.embeds) and settings.blank_answers:
        raise ConfigError(
            f"data.bundled.blank_answers={settings.blank_answers:g} with train.loss={recipe.train.loss}: what is "
            "compared is compared as it is; set data.blank_answers=0"
        )
    align, cost = recipe.packing.align or 1, training_cost(assembly.config, recipe)
    rows_read, decoder = RowCounter(tick), decoder_for(recipe.data)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    decoder.tick = tick
    options: JsonObject = {
        "decoder": decoder,
        "budget": recipe.packing.budget,
        "align": align,
        "tick": rows_read,
        "bad_rows": folder / "bad_rows.jsonl" if world.is_main else None,
        "pairs": recipe.train.pairs,
        "media_dtype": torch.bfloat16 if recipe.engine.precision == "bf16" else None,
        "labelled": recipe.train.labelled,
        "embed": recipe.embed if recipe.train.embeds else None,
    }
    workers, blank = worker_processes.count_for(settings, local_ranks), settings.blank_answers
    training: JsonObject = {"augment": settings.augment, "blank": blank, "seed": recipe.run.seed, "workers": workers}
    source = SampleSource.open(settings.train, assembly.processor, settings, **options, **training)
    if teacher_on_disk(recipe):
        for key, value in (("augment", settings.augment), ("blank_answers", settings.blank_answers)):
            if value:
                raise ConfigError(
                    f"data.{key}={value:g} with distill.teacher={recipe.distill.teacher}: the tokens on disk are of rows as they are; "
                    f"set data.{key}=0, or name the teacher's weights, which then runs in each step"
                )
        source.teacher = TokenReader(str(recipe.distill.teacher), recipe.distill, assembly.config.text.vocab_size)
    if recipe.train.labelled and source.rows.has_stream:
        raise UserError(
            f"train.loss={recipe.train.loss}: each row of data.train is compared with the one before it, which a stream no longer has; "
            "read it as a table"
        )
    rank, size = world.dp_rank, world.dp_size
    loader: BatchLoader | RolloutLoader
    if recipe.rl.algorithm is not None:
        loader = RolloutLoader(source, recipe, world, object_group(), most=most_positions(assembly.config))
    else:
        loader = BatchLoader(source, recipe, align=align, dp_rank=rank, dp_size=size, cost=cost, group=object_group())
    if not settings.eval or recipe.train.eval_rows == 0:
        return RunData(source, loader, None, None, decoder, rows_read)
    options |= {"max_rows": recipe.train.eval_rows, "evaluation": True}
    held_out = SampleSource.open(settings.eval, assembly.processor, settings, **options)
    eval_set = recipe_batches(recipe, held_out, world, cost=cost)
    return RunData(source, loader, held_out, eval_set, decoder, rows_read)
