"""Greedy answers of the model in training to a few held-out rows, the same ones at each evaluation.

All ranks take part, under any layout; a run's numbers are the same with and without.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch.distributed as dist

from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.loading.bad_rows import BadRows
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.row_set import spread
from zoo.generation.decoding import Decoding
from zoo.generation.generator import Generator
from zoo.generation.sampling import Sampling, end_tokens
from zoo.generation.scores.answer_scores import exact_match
from zoo.logging.predictions_plot import Prediction
from zoo.model.build import Assembly
from zoo.parallel.object_group import agreed
from zoo.parallel.world import World

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

SEARCHED = 512  # held-out rows, spread over all, that are looked through for kinds
MARGIN = 8  # tokens that an answer may have above the longest one wanted


def predict(
    recipe: Recipe, assembly: Assembly, world: World, held_out: SampleSource, chunks: Sequence[MegatronModule]
) -> list[Prediction]:
    """The answers to log.predictions rows of `held_out`, in the rows' order; every rank calls it, and gets them all.

    The model chunks are in training mode afterwards.
    """
    if not recipe.log.predictions:
        return []
    ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
    finder = Generator(Decoding(assembly, chunks, recipe, world, Sampling(), ends), 1, BadRows(recipe.data))
    refused = _refused(held_out, world)
    # Whether a medium is decoded in time may differ between ranks.
    chosen = agreed(lambda: _chosen(finder, held_out, recipe.log.predictions, refused))
    if not chosen:
        return []
    tokenizer = assembly.processor.tokenizer
    longest = max(len(tokenizer(answer)["input_ids"]) for answer in chosen.values())
    sampling = Sampling(min(recipe.log.prediction_tokens, longest + MARGIN))
    decoding = Decoding(assembly, chunks, recipe, world, sampling, ends)
    share = -(-len(chosen) // world.dp_size)
    for chunk in chunks:
        chunk.eval()
    results = Generator(decoding, share, BadRows(recipe.data)).all(held_out.rows, list(chosen))
    for chunk in chunks:
        chunk.train()
    predictions = []
    for number, result in results.items():
        row = held_out.rows.row(SampleId(number))
        answers = row.answers or (chosen[number],)
        right = exact_match(result["text"], answers).value == 1.0
        predictions.append(Prediction(row, chosen[number], result["text"], right))
    return predictions


def _refused(held_out: SampleSource, world: World) -> set[int]:
    """Numbers of the rows that evaluating has left out, on any rank, among those that are looked through."""
    local_rows = set(filter(held_out.bad_rows.refuses, spread(len(held_out), SEARCHED)))
    everyone = [local_rows]
    if world.size > 1:
        everyone = [set() for _ in range(world.size)]
        dist.all_gather_object(everyone, local_rows)
    return set().union(*everyone)


def _chosen(finder: Generator, held_out: SampleSource, most: int, refused: Collection[int] = ()) -> dict[int, str]:
    """Number and answer of the rows to show, in the order of the rows: as many of each kind, spread over its rows."""
    kinds: dict[str, list[int]] = {}
    for number in spread(len(held_out), SEARCHED):
        if number in refused:
            continue
        try:
            row = held_out.rows.row(SampleId(number))
        except RowError:
            continue
        if row.text is None and row.messages[-1].role == "assistant":
            kinds.setdefault(row.kind or " ".join(sorted(row.media)), []).append(number)
    chosen: dict[int, str] = {}
    by_kind = []
    for numbers in kinds.values():  # as many as are wanted of all parts, then the others, where these can't be used
        first = [numbers[index] for index in spread(len(numbers), -(-most // len(kinds)))]
        by_kind.append([*first, *(number for number in numbers if number not in first)])
    for number in (n for turn in zip_longest(*by_kind) for n in turn if n is not None):
        if len(chosen) == most:
            break
        try:
            reference = finder.prompt(held_out.rows.row(SampleId(number))).reference
        except RowError:
            continue
        if reference:
            chosen[number] = reference
    return dict(sorted(chosen.items()))
