"""Greedy answers to held-out rows, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from zoo.config.schema import Recipe
from zoo.data.errors import RowError
from zoo.data.loading.lengths import RankGroup
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.row_set import spread
from zoo.generation.decoding import Decoding
from zoo.generation.generator import Generator, gather_rows
from zoo.generation.prompts import Prompt
from zoo.generation.sampling import Sampling, end_tokens
from zoo.generation.scores.answer_scores import exact_match
from zoo.logging.predictions_plot import Prediction
from zoo.model.build import Assembly
from zoo.parallel.world import World
from zoo.rollouts.engine import GreedyEngine, Rollout, RolloutPrompt
from zoo.rollouts.loader import together
from zoo.rollouts.prompts import asked
from zoo.rollouts.rewards.rewards import Rewards
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type Scored = tuple[str | None, list[float]]
"""The kind of a row, and of its answer: reward, each reward, exact match, tokens, and whether it was cut."""


class HeldOutAnswers:
    """Answers the rows of data.eval, most likely tokens alone, and scores them."""

    def __init__(
        self,
        recipe: Recipe,
        assembly: Assembly,
        world: World,
        chunks: Sequence[MegatronModule],
        rewards: Rewards,
        group: RankGroup,
        reward_model: Callable[[Sequence[Rollout]], list[float]] | None = None,
        engine: GreedyEngine | None = None,
    ) -> None:
        """`chunks`: of the model in training; `group`: all ranks; `reward_model`: as `Connections` has it; `engine`: answers in the model's place."""
        self.reward_model, self.engine = reward_model, engine
        self.recipe, self.world, self.chunks, self.rewards, self.group = recipe, world, chunks, rewards, group
        ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
        self.decoding = Decoding(assembly, chunks, recipe, world, Sampling(recipe.rl.max_new_tokens), ends)

    def __call__(self, held_out: SampleSource, proceed: Callable[[], bool]) -> tuple[JsonObject, list[Prediction]]:
        """Metrics over all rows, and log.predictions of the answers; every rank calls it, and gets the same.

        Args:
            held_out: the rows.
            proceed: asked between two batches of answers, by all ranks together; once it says no, there is no result.
        """
        generator = Generator(self.decoding, self.recipe.rl.batch, held_out.bad_rows)
        count = self.recipe.rl.batch * self.world.dp_size
        results: dict[int, JsonObject] = {}
        with self._ready():
            for first in range(0, len(held_out), count):
                if not proceed():
                    break
                numbers = range(first, min(first + count, len(held_out)))
                results |= (
                    generator.all(held_out.rows, numbers)
                    if self.engine is None
                    else self._by_engine(self.engine, generator, held_out, numbers)
                )
            else:
                first = len(held_out)
        if first < len(held_out):
            return {}, []
        local = list(results)[self.world.dp_rank :: self.world.dp_size]
        scores_here, of_model = self.world.counts_data, list[float]()
        rollouts = []
        if scores_here or self.reward_model is not None:
            rollouts = [self._rollout(generator, held_out, number, results[number]) for number in local]
        if self.reward_model is not None:
            of_model = self.reward_model(rollouts)
        if not scores_here:
            local, rollouts, of_model = [], [], []
        scores = together(self.group, lambda: self.rewards.score(rollouts, of_model)).values.tolist()
        scored = {n: self._scored(r, s) for n, r, s in zip(local, rollouts, scores, strict=True)}
        everyone = {n: row for of_rank in self.group.gather(scored) for n, row in of_rank.items()}
        ordered = {number: everyone[number] for number in sorted(everyone)}
        return self._metrics(ordered), self._predictions(held_out, results, ordered)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """What answers is ready to do so inside the block: the model in evaluation mode, or the engine with its weights."""
        if self.engine is not None:
            self.engine.wake()
            self.engine.update_weights()
            yield
            self.engine.sleep()
            return
        training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        yield
        for chunk, was_training in zip(self.chunks, training, strict=True):
            chunk.train(was_training)

    def _by_engine(
        self, engine: GreedyEngine, generator: Generator, held_out: SampleSource, numbers: Sequence[int]
    ) -> dict[int, JsonObject]:
        """As `Generator.all`, by the engine."""
        prompts: dict[int, Prompt] = {}
        for number in numbers[self.world.dp_rank :: self.world.dp_size]:
            try:
                prompts[number] = generator.prompt(held_out.rows[number])
            except RowError as error:
                held_out.bad_rows.leave_out(number, error)
        wanted = [RolloutPrompt(number, asked(prompt.row), prompt.sample) for number, prompt in prompts.items()]
        answers = engine.most_likely(wanted)
        results = zip(prompts.items(), answers, strict=True)
        local = {number: generator.result(prompt, [*answer.token_ids]) for (number, prompt), answer in results}
        return gather_rows(local, self.world)

    def _rollout(self, generator: Generator, held_out: SampleSource, number: int, result: JsonObject) -> Rollout:
        prompt = generator.prompt(held_out.rows.row(SampleId(number)))
        finished, tokens = result["finish"] == "stop", tuple(result["token_ids"])
        asked_row = RolloutPrompt(number, asked(prompt.row), prompt.sample)
        return Rollout(asked_row, 0, tokens, (0.0,) * len(tokens), finished, result["text"])

    def _scored(self, rollout: Rollout, scores: list[float]) -> Scored:
        total = sum(score * weight for score, weight in zip(scores, self.rewards.weights.values(), strict=True))
        row, tokens = rollout.prompt.row, len(rollout.token_ids)
        match = exact_match(rollout.text, row.answers).value
        return row.kind, [total, *scores, match, float(tokens), float(not rollout.finished)]

    def _metrics(self, scored: dict[int, Scored]) -> JsonObject:
        names = ["reward", *(f"reward/{name}" for name in self.rewards.weights)]
        names += ["exact_match", "answer_tokens", "answers_cut"]

        def means(rows: list[list[float]]) -> JsonObject:
            totals = map(sum, zip(*rows, strict=True)) if rows else [0.0] * len(names)
            averages = {name: total / max(len(rows), 1) for name, total in zip(names, totals, strict=True)}
            return {**averages, "rows": len(rows)}

        kinds: dict[str, list[list[float]]] = {}
        for kind, values in scored.values():
            kinds.setdefault(kind or "row", []).append(values)
        by_kind = {kind: means(rows) for kind, rows in sorted(kinds.items())}
        return {**means([values for _, values in scored.values()]), "by_kind": by_kind}

    def _predictions(
        self, held_out: SampleSource, results: dict[int, JsonObject], scored: dict[int, Scored]
    ) -> list[Prediction]:
        kinds: dict[str | None, list[int]] = {}
        for number, (kind, _) in scored.items():
            kinds.setdefault(kind, []).append(number)
        most, shown = self.recipe.log.predictions, list[Prediction]()
        of_kinds = [[numbers[at] for at in spread(len(numbers), -(-most // len(kinds)))] for numbers in kinds.values()]
        in_turn = [number for turn in zip_longest(*of_kinds) for number in turn if number is not None]
        for number in sorted(in_turn[:most]):
            row, (_, values) = held_out.rows.row(SampleId(number)), scored[number]
            wanted = results[number]["reference"] or next(iter(row.answers), "")
            right = bool(values[1 + len(self.rewards.weights)])
            shown.append(Prediction(row, wanted, results[number]["text"], right, values[0]))
        return shown
