"""Answers that an engine samples, as a batch that it can be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.loading.bad_rows import BadRows
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row
from zoo.generation.decoding import Decoding
from zoo.generation.generator import Generator
from zoo.generation.prompts import Prompt, ends_with_question, with_stand_in
from zoo.generation.sampling import Sampling, end_tokens
from zoo.parallel.world import World
from zoo.rl.batch import Prepared
from zoo.rl.parts import EngineParts
from zoo.types import JsonMapping, JsonObject


@dataclass(frozen=True)
class Generated:
    """What `zoo.Engine.generate` gives: B answers of this rank's replica, those to one row side by side.

    Attributes:
        batch: for `logprobs` and `train_step`: `input_ids` (B, T) int64 and `attention_mask` (B, T) bool, padded on the right,
            `loss_mask` (B, T) bool, True on the answers' tokens, and `media`. On the host. From a token on that would stand for a
            medium, an answer is left out of it.
        answers: dicts as `zoo.generate` returns them: `text`, `reference` (the row's own answer, or None), `token_ids`, ...
    """

    batch: JsonObject
    answers: list[JsonObject]


@dataclass(frozen=True)
class _Sampled(Generator):
    """Answers rows of which several are the same object, whose prompt is made once."""

    made: dict[int, Prompt] = field(default_factory=dict)

    def prompt(self, row: Row, answered: bool = True) -> Prompt:
        if id(row) not in self.made:
            self.made[id(row)] = super().prompt(row, answered)
        return self.made[id(row)]


def generate(
    parts: EngineParts,
    recipe: Recipe,
    world: World,
    rows: Sequence[Row | JsonMapping],
    samples: int,
    sampling: Sampling,
    batch: int,
) -> Generated:
    """`samples` answers to each row; the arguments of `zoo.Engine.generate`."""
    assembly = parts.assembly
    literal = recipe.data.literal_tags or set(assembly.processor.modalities) <= {"text"}
    asked = [row if isinstance(row, Row) else _row(row, literal) for row in rows]
    for chunk in parts.chunks:
        chunk.eval()
    ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
    decoding = Decoding(assembly, parts.chunks, recipe, world, sampling, ends)
    generator = _Sampled(decoding, batch, BadRows(recipe.data))
    every = [row for row in asked for _ in range(samples)]
    open_ones = {at for at, row in enumerate(rows) if not isinstance(row, Row) and ends_with_question(row)}
    unanswered = frozenset(number for number in range(len(every)) if number // samples in open_ones)
    results = generator.all(every, range(len(every)), unanswered)
    local_numbers = [number for number in results if number // samples % world.dp_size == world.dp_rank]
    prompts = [generator.prompt(every[number]) for number in local_numbers]
    answers = [results[number] for number in local_numbers]
    # An answer ends before the first token that would stand for a medium, which there is none of.
    media = assembly.processor.media_ids
    answer_tokens = [list(takewhile(lambda token: token not in media, answer["token_ids"])) for answer in answers]
    return Generated(_batch(prompts, answer_tokens, assembly.processor.pad_id), answers)


def _row(item: JsonMapping, literal: bool) -> Row:
    return make_row(with_stand_in(item), "", Access(Path(), outside=True), Form(literal_tags=literal))


def _batch(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], pad: int) -> JsonObject:
    """Prompts and answers in rows (B, T), padded on the right."""
    pairs = zip(prompts, answers, strict=True)
    rows = [torch.cat([prompt.sample.input_ids, torch.tensor(tokens, dtype=torch.int64)]) for prompt, tokens in pairs]
    shape = (len(rows), max(map(len, rows), default=0))
    ids, real, chosen = torch.full(shape, pad), torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[number, : len(row)], real[number, : len(row)] = row, True
        chosen[number, prompt.sample.length : len(row)] = True
    media: list[Mapping[str, Tensor]] = [Prepared(prompt.sample.media) for prompt in prompts]
    return {"input_ids": ids, "attention_mask": real, "loss_mask": chosen, "media": media}
