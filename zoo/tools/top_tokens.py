"""A teacher's most likely tokens of the answers of some rows, written to a folder that students learn from; `zoo.top_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from zoo.checkpoint import initial_weights
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources import identity
from zoo.data.sources.streams import RowStream
from zoo.errors import UserError
from zoo.files import expanded
from zoo.launch.launcher import run_task
from zoo.launch.prepare import world_size
from zoo.logging import terminal
from zoo.logging.result import Model
from zoo.model import build
from zoo.nn.head import TopK
from zoo.parallel.object_group import agreed, object_group
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.world import World, open_world
from zoo.steps.packed_step import PackedStep
from zoo.tools.asking import AskedRows, asked, open_asked, say_left_out
from zoo.training.distillation.teacher import top_tokens_of
from zoo.training.distillation.token_files import ROWS, RowTokens, TokenWriter
from zoo.training.evaluation import recipe_batches
from zoo.training.passes.reference import plain_digest, weights_identity
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

DATA = (  # keys that the tokens follow from
    "labels", "template", "literal_tags", "special_tokens", "video_fps", "max_frames", "min_pixels", "max_pixels",
    "video_max_pixels", "overlong",
)  # fmt: skip


@preserve_process_state()
def top_tokens(
    path: Model,
    rows: AskedRows,
    out: str | Path,
    overrides: Overrides = (),
    *,
    top_k: int = 64,
    temperature: float = 1.0,
    in_process: bool = False,
) -> dict[str, int]:
    """Write the tokens that a teacher finds most likely at each label of some rows, for `distill.teacher`.

    The same call goes on with a folder that an earlier one has left half-way.

    Args:
        path: the teacher, as `zoo.score` takes a model.
        rows: as `zoo.score` takes them.
        out: the folder.
        overrides: recipe keys, as `zoo.score` takes them; neither the layout nor packing changes the result.
        top_k: tokens of each label; the others are one outcome.
        temperature: divides the teacher's logits.
        in_process: in this process, as `zoo.score` takes it.

    Returns:
        `rows` (those that were left out as bad ones not counted), `labels`, and the `files` written by this call.

    Raises:
        UserError: as `zoo.score`; a folder of other tokens.
    """
    with asked(path, rows, overrides) as recipe:
        recipe = recipe.replace({"distill.top_k": top_k, "distill.temperature": temperature})
        task, folder = "zoo.tools.top_tokens:top_tokens_here", str(expanded(out).absolute())
        done: dict[str, int] = run_task(task, recipe, world_size(recipe), folder, fresh=not in_process)
        return done


@torch.no_grad()
def top_tokens_here(recipe: Recipe, out: str) -> dict[str, int]:
    """`top_tokens` on this rank, for the rows of data.eval."""
    with open_world(recipe) as world:
        recipe = validate(recipe, world.size)
        assembly = build.assemble(recipe)
        source = open_asked(recipe, assembly.processor)
        if source.rows.has_stream:
            raise UserError("a stream has no end to write a teacher's tokens up to; read the rows as a table")
        settings = _made_by(recipe, assembly, source)
        writer = agreed(lambda: TokenWriter(Path(out), settings))
        chunks = initial_weights.load_frozen(assembly, recipe, world)
        step = build.build_step(assembly, recipe, world)
        missing = [number for number in range(writer.count) if not writer.has(number)]
        for number in missing:
            rows = range(number * ROWS, min((number + 1) * ROWS, len(source)))
            tokens = _tokens(recipe, source, step, chunks, world, rows)
            if world.is_main:
                writer.write(number, tokens)
            terminal.detail(f"{number + 1} of {writer.count} files")
        say_left_out(source, world)
        totals = {name: sum(entry[name] for entry in writer.files.values()) for name in ("rows", "labels")}
        return {**totals, "files": len(missing)}


def _made_by(recipe: Recipe, assembly: build.Assembly, source: SampleSource) -> JsonObject:
    """What the tokens follow from."""
    vocabulary = assembly.config.text.vocab_size
    known = [identity.digests_of_rows("", part) for part in source.rows.parts if not isinstance(part, RowStream)]
    rows = [(part.rows, part.digests) for part in known]
    data: JsonObject = {name: getattr(recipe.data, name) for name in DATA}
    return {
        "top_k": min(recipe.distill.top_k, vocabulary),
        "temperature": recipe.distill.temperature,
        "vocabulary": vocabulary,
        "model": plain_digest(weights_identity(recipe, assembly)),
        "data": plain_digest([data, recipe.packing.budget, rows]),
        "rows": len(source),
    }


def _tokens(
    recipe: Recipe, source: SampleSource, step: PackedStep, chunks: Sequence[MegatronModule], world: World, rows: range
) -> list[RowTokens]:
    """The tokens of these rows, in their order; the same on all ranks."""
    batches = recipe_batches(recipe, source, world, rows=rows)
    wanted = TopK(recipe.distill.top_k, recipe.distill.temperature)
    local_tokens: dict[int, tuple[bytes, list[np.ndarray]]] = {}
    for numbers, batch in zip(batches.bins, batches, strict=True):
        top = top_tokens_of(step, chunks, batches.filler() if batch is None else batch, world, wanted)
        if batch is None or top is None or not world.counts_loss:
            continue
        tokens, places = top
        bounds = torch.tensor([*batch.starts, batch.input_ids.numel()])
        owner = torch.searchsorted(bounds, places, right=True) - 1
        arrays = [places, *(column.cpu() for column in tokens)]
        for segment, number in enumerate(numbers):
            chosen = owner == segment
            local_tokens[number] = (source.digest(number), [array[chosen].numpy() for array in arrays])
    everyone: dict[int, list[tuple[bytes, list[np.ndarray]]]] = {}
    for of_rank in object_group().gather(local_tokens):
        for row, row_tokens in of_rank.items():
            everyone.setdefault(row, []).append(row_tokens)
    return [_joined(everyone[row]) for row in sorted(everyone)]


def _joined(parts: Sequence[tuple[bytes, list[np.ndarray]]]) -> RowTokens:
    """A row's labels in order, which context-parallel ranks have parts of."""
    places, *arrays = (np.concatenate(column) for column in zip(*(part[1] for part in parts), strict=True))
    order = np.argsort(places)
    ids, logprobs, rest = (column[order] for column in arrays)
    return RowTokens(parts[0][0], ids, logprobs, rest)
