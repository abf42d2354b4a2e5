"""`PromptStream`: the rows of data.train as prompts, in an order that follows from the seed alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.loading.lengths import RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.formats.tags import plain
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.generation.prompts import make_prompt
from zoo.rollouts.engine import RolloutPrompt
from zoo.types import JsonObject


class PromptStream:
    """Prompts without end, epoch after epoch. Every rank draws the same ones, and encodes those of its replica."""

    def __init__(self, source: SampleSource, recipe: Recipe, group: RankGroup, *, most: int) -> None:
        """`group`: all ranks; `most`: positions that the model was made for."""
        self.source, self.recipe, self.group, self.most = source, recipe, group, most
        self.epoch = self.position = 0  # of the next row, the position within its epoch
        self.number = 0  # rows drawn so far
        self._sizes = source.rows.sizes  # when the epoch began
        self._bad = 0  # rows one after the other that can't be used
        self._order: np.ndarray | None = None

    def take(self, count: int, replica: int, replicas: int) -> dict[int, RolloutPrompt | None]:
        """`count` prompts by number; None for those of other replicas, to which they are dealt in turn.

        Rows that can't be used are left out on all ranks, and others drawn for them. Every rank calls it.

        Raises:
            RowError: such a row, under data.on_error=raise.
            UserError: there is no other.
        """
        taken: dict[int, RolloutPrompt | None] = {}
        while len(taken) < count:
            drawn = [self._draw() for _ in range(count - len(taken))]
            mine: dict[int, RolloutPrompt] = {}
            bad: dict[int, RowError] = {}
            for index, (number, sample_id) in enumerate(drawn, len(taken)):
                if index % replicas == replica:
                    try:
                        mine[number] = self._encode(number, sample_id)
                    except RowError as error:
                        bad[number] = error.bare()
            everyone = dict(item for of_rank in self.group.gather(bad) for item in of_rank.items())
            for number, sample_id in drawn:
                if number in everyone:
                    self.source.leave_out(sample_id, everyone[number])
                else:
                    taken[number] = mine.get(number)
            self._bad = self._bad + len(everyone) if len(everyone) == len(drawn) else 0
            if self._bad > len(self.source):
                raise UserError(f"data.train: no row can be used as a prompt ({self.source.bad_rows.summary()})")
        return taken

    def state_dict(self) -> JsonObject:
        """Plain values from which another stream goes on."""
        return {"epoch": self.epoch, "position": self.position, "number": self.number, "sizes": self._sizes}

    def load_state_dict(self, state: JsonObject) -> None:
        """Go on from a saved state; rows that have been added since join in the next epoch."""
        self.epoch, self.position, self.number = state["epoch"], state["position"], state["number"]
        self._sizes, self._order = state["sizes"], None

    def _draw(self) -> tuple[int, SampleId]:
        if self._order is None:
            seed, shuffle = self.recipe.run.seed, self.recipe.data.shuffle
            self._order = self.source.rows.order(self.epoch, seed, shuffle, self._sizes)
        if self.position == len(self._order):
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
            self._sizes = self.source.rows.sizes
            return self._draw()
        drawn = self.number, SampleId(int(self._order[self.position]))
        self.position, self.number = self.position + 1, self.number + 1
        return drawn

    def _encode(self, number: int, sample_id: SampleId) -> RolloutPrompt:
        row = self.source.rows.row(sample_id)
        processor, rl = self.source.processor, self.recipe.rl
        prompt = make_prompt(processor, row, self.recipe.data, most=self.most)
        align, budget = self.recipe.packing.align or 1, self.recipe.packing.budget
        if (needed := -(-(prompt.sample.length + rl.max_new_tokens) // align) * align) > budget:
            text = f"the prompt has {prompt.sample.length} tokens, with rl.max_new_tokens={rl.max_new_tokens} {needed}, over packing.budget={budget}."
            raise RowError(row.source, "overlong", text)
        return RolloutPrompt(number, asked(row), prompt.sample)


def asked(row: Row) -> Row:
    """The row without its last answer, which is among `answers` then."""
    if row.messages[-1].role != "assistant":
        return row
    kept = len(row.messages) - 1
    answers = row.answers or (plain(row.messages[-1].content),)
    by_message = {name: getattr(row, name)[:kept] for name in ("weights", "calls", "names")}
    return replace(row, messages=row.messages[:-1], answers=answers, **by_message)
