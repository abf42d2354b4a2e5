"""`LocalEngine`: the model in training generates, under any parallel layout, on any machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zoo.config.schema import Recipe
from zoo.data.sample import IGNORE, Sample
from zoo.generation.decoding import Decoding
from zoo.generation.routing import RoutingNotes
from zoo.generation.sampling import Answers, Sampling, end_tokens
from zoo.model.build import Assembly
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World
from zoo.rollouts.engine import Rollout, RolloutPrompt

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type Asked = tuple[RolloutPrompt, range]
"""A prompt, and the numbers of the answers to it that are made together."""


class LocalEngine:
    """Generates with the trainer's own model. It holds no memory between calls, and its weights are always the trainer's."""

    def __init__(
        self, recipe: Recipe, assembly: Assembly, chunks: Sequence[MegatronModule], world: World, *, replay: bool
    ) -> None:
        """`chunks`: of the model in training; `replay`: answers come with the experts of their tokens."""
        rl = recipe.rl
        sampling = Sampling(rl.max_new_tokens, rl.temperature, rl.top_p, recipe.run.seed)
        ends = end_tokens(assembly.source.files if assembly.source else None, assembly.processor)
        self.decoding = Decoding(assembly, chunks, recipe, world, sampling, ends)
        self.chunks, self.batch, self.replay = chunks, rl.batch, replay

    @torch.no_grad()
    def generate(self, prompts: Sequence[RolloutPrompt], samples: int) -> list[Rollout]:
        """As `RolloutEngine.generate` says; a replica without prompts joins the passes of the others."""
        decoding, rollouts = self.decoding, list[Rollout]()
        training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        bins = self._bins(prompts, samples)
        while decoding.any(bool(asked := next(bins, []))):
            rollouts += self._answered(asked, samples)
        for chunk, was_training in zip(self.chunks, training, strict=True):
            chunk.train(was_training)
        return rollouts

    def update_weights(self) -> None:
        """Wait until the weights of the last update have come from the data-parallel ranks."""
        settle_all()

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def wake(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Nothing is held between calls."""

    def _bins(self, prompts: Sequence[RolloutPrompt], samples: int) -> Iterator[list[Asked]]:
        """What is generated together: up to rl.batch answers, and up to packing.budget tokens that a pass reads.

        With a cache these are the tokens of the prompts, each of which is read once; without, those of prompts and answers.
        """
        decoding, most = self.decoding, self.decoding.sampling.max_new_tokens
        budget, align = decoding.recipe.packing.budget, decoding.align
        copies = min(samples, self.batch) if decoding.keeps_cache else 1
        together: list[Asked] = []
        tokens = 0
        for prompt in prompts:
            read = prompt.sample.length + (0 if decoding.keeps_cache else most)
            read = -(-read // align) * align
            for first in range(0, samples, copies):
                numbers = range(first, min(first + copies, samples))
                answers = sum(len(asked) for _, asked in together)
                if together and (
                    tokens + read > budget or answers + len(numbers) > self.batch or len(numbers) != len(together[0][1])
                ):
                    yield together
                    together, tokens = [], 0
                together, tokens = [*together, (prompt, numbers)], tokens + read
        if together:
            yield together

    def _answered(self, asked: Sequence[Asked], samples: int) -> list[Rollout]:
        decoding = self.decoding
        if not asked:
            decoding.answers([self._filler()], [0])
            return []
        numbers = [(prompt, number) for prompt, of_prompt in asked for number in of_prompt]
        notes = None
        if self.replay:
            config = self.chunks[0].config
            layers = sum(config.moe_layer_freq)
            notes = RoutingNotes(decoding.world, bool(config.sequence_parallel), layers, config.moe_router_topk)
        draws = [prompt.number * samples + number for prompt, number in numbers]
        inputs = [prompt.sample for prompt, _ in asked]
        answers = decoding.answers(inputs, draws, len(asked[0][1]), notes)
        return [self._rollout(*key, answers, at, notes) for at, key in enumerate(numbers)]

    def _rollout(
        self, prompt: RolloutPrompt, number: int, answers: Answers, at: int, notes: RoutingNotes | None
    ) -> Rollout:
        tokens = answers.tokens[at]
        finished = bool(tokens) and tokens[-1] in answers.ends
        text = self.decoding.assembly.processor.answer_text(tokens[:-1] if finished else tokens)
        routing = None if notes is None else notes.experts_of(at, len(tokens))
        return Rollout(prompt, number, tuple(tokens), tuple(answers.logprobs[at]), finished, text, routing)

    def _filler(self) -> Sample:
        """A prompt of one token of text, whose answer is dropped."""
        media = self.decoding.assembly.processor.media_ids
        token = next(token for token in range(len(media) + 1) if token not in media)
        return Sample(torch.tensor([token]), torch.tensor([IGNORE]))
