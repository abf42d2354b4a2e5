"""`Generator`: a loaded model on this rank that answers rows, dealt out over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from zoo.checkpoint import initial_weights
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.errors import RowError
from zoo.data.loading.bad_rows import BadRows
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.generation.decoding import Decoding
from zoo.generation.prompts import Prompt, make_prompt, most_positions
from zoo.generation.sampling import Sampling, end_tokens
from zoo.model import build
from zoo.parallel.world import World, open_world
from zoo.types import JsonObject


@dataclass(frozen=True)
class Generator:
    """Answers rows with a model on this rank."""

    decoding: Decoding  # makes the tokens
    batch: int  # most prompts that are answered at once
    bad_rows: BadRows  # decides about rows that can't be used

    def all(
        self,
        rows: Sequence[Row],
        numbers: Sequence[int],
        unanswered: frozenset[int] = frozenset(),
        keep: Callable[[Mapping[int, JsonObject]], object] | None = None,
    ) -> dict[int, JsonObject]:
        """The results of all rows, by number, on every rank; see `result`.

        Args:
            rows: a `RowSet`, or rows; the same on every rank.
            numbers: which of them are answered.
            unanswered: numbers of those whose last answer is a stand-in.
            keep: called with this rank's new results, as often on every rank.
        """
        world, decoding = self.decoding.world, self.decoding
        groups = [numbers[first : first + self.batch] for first in range(0, len(numbers), self.batch)]
        local_results: dict[int, JsonObject] = {}
        bins = self._bins(groups[world.dp_rank :: world.dp_size], rows, unanswered)
        filler: dict[int, Prompt] = {}
        while decoding.any((prompts := next(bins, {})) != {}, everywhere=keep is not None):
            new: dict[int, JsonObject] = {}
            if not prompts and decoding.together:  # other ranks have some left, which this one takes passes with
                filler = filler or self._filler(rows, numbers, unanswered)
                self.answered(filler)
            elif prompts:
                new = dict(self.answered(prompts))
            if keep is not None:
                keep(new)
            local_results |= new
        return gather_rows(local_results, world)

    def answered(self, prompts: Mapping[int, Prompt]) -> Mapping[int, JsonObject]:
        """The results of prompts by number, which are answered at once."""
        tokens = self.decoding.answer([prompt.sample for prompt in prompts.values()], list(prompts))
        return {n: self.result(prompt, new) for (n, prompt), new in zip(prompts.items(), tokens, strict=True)}

    def result(self, prompt: Prompt, tokens: list[int]) -> JsonObject:
        """An answer as users read it.

        `source` (the row's file and line), `kind`, `text`, `reference` (the row's own answer, or None), `prompt_tokens`,
        `token_ids` (with the end token) and `finish`: "stop", or "length" for an answer that was cut.
        """
        processor, ends = self.decoding.assembly.processor, self.decoding.ends
        stopped = bool(tokens) and tokens[-1] in ends
        answer_tokens = tokens[:-1] if stopped else tokens
        return {
            "source": prompt.row.source,
            "kind": prompt.row.kind,
            "text": processor.answer_text(answer_tokens),
            "reference": prompt.reference,
            "prompt_tokens": prompt.sample.length,
            "token_ids": tokens,
            "finish": "stop" if stopped else "length",
        }

    def prompt(self, row: Row, answered: bool = True) -> Prompt:
        """The prompt of a row; RowError as `make_prompt` raises it."""
        assembly, data = self.decoding.assembly, self.decoding.recipe.data
        return make_prompt(assembly.processor, row, data, most=most_positions(assembly.config), answered=answered)

    def _bins(
        self, groups: Sequence[Sequence[int]], rows: Sequence[Row], unanswered: frozenset[int]
    ) -> Iterator[dict[int, Prompt]]:
        """Prompts by number that are read in one pass: a group's, up to packing.budget tokens."""
        budget, align = self.decoding.recipe.packing.budget, self.decoding.align
        for group in groups:
            prompts: dict[int, Prompt] = {}
            tokens = 0
            for number in group:
                try:
                    prompt = self.prompt(rows[number], number not in unanswered)
                except RowError as error:
                    self.bad_rows.leave_out(number, error)
                    continue
                length = -(-prompt.sample.length // align) * align
                if prompts and tokens + length > budget:
                    yield prompts
                    prompts, tokens = {}, 0
                prompts[number], tokens = prompt, tokens + length
            if prompts:
                yield prompts

    def _filler(self, rows: Sequence[Row], numbers: Sequence[int], unanswered: frozenset[int]) -> dict[int, Prompt]:
        """The first prompt that can be built, for a rank without rows: it joins the others' passes, and its answer is dropped."""
        for number in numbers:
            try:
                return {number: self.prompt(rows[number], number not in unanswered)}
            except RowError:
                continue
        raise UserError(f"no row can be used ({self.bad_rows.summary()})")


@contextmanager
def load_generator(recipe: Recipe, sampling: Sampling, batch: int, cached: bool | None = None) -> Iterator[Generator]:
    """The model that a recipe's `model.init` names, loaded on this rank under the recipe's parallel layout."""
    with open_world(recipe) as world:
        recipe = validate(recipe, world.size)
        assembly = build.assemble(recipe)
        chunks = initial_weights.load_frozen(assembly, recipe, world)
        ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
        decoding = Decoding(assembly, chunks, recipe, world, sampling, ends, cached)
        yield Generator(decoding, batch, BadRows(recipe.data))


def gather_rows[Result](local_results: Mapping[int, Result], world: World) -> dict[int, Result]:
    """The results of all ranks, in the order of their rows' numbers."""
    everyone: list[Mapping[int, Result]] = [{} for _ in range(world.size)]
    dist.all_gather_object(everyone, local_results)
    return dict(sorted((number, result) for of_rank in everyone for number, result in of_rank.items()))
