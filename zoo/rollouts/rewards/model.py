"""A reward model beside the model in training, under the same parallel layout: each sampled answer's score is a reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.checkpoint import initial_weights
from zoo.checkpoint.selection import is_reward_model
from zoo.config.locate import locate
from zoo.config.schema import Recipe
from zoo.data.loading.batches import make_batch
from zoo.data.loading.lengths import RankGroup
from zoo.data.processors.processor import Processor
from zoo.data.sample import MicroBatch, Sample
from zoo.data.sources.rows import Message, Row
from zoo.errors import UserError
from zoo.model import build
from zoo.packing import plan_bins
from zoo.packing.binning import spread
from zoo.parallel.world import World
from zoo.rollouts.engine import Rollout
from zoo.steps.packed_step import PackedStep

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type Logprobs = Callable[[PackedStep, Sequence[MegatronModule], MicroBatch, World], Tensor | None]
"""`zoo.training.evaluation.token_logprobs`."""

SCORING = {
    "rl.algorithm": None, "rl.reference": None, "rl.reward_model": None, "train.keep_best": None, "train.loss": "reward"
}  # fmt: skip
STAND_INS = ("x", "y")  # answers of one token that differ


class RewardModel:
    """Scores answers as training and transformers do: at the last token of the conversation that ends with the answer."""

    def __init__(
        self, recipe: Recipe, assembly: build.Assembly, world: World, group: RankGroup, logprobs: Logprobs
    ) -> None:
        """A reward model in memory, beside the model in training.

        Args:
            recipe, assembly: of the run.
            group: all ranks.
            logprobs: runs a step's micro-batch, which every rank does.

        Raises:
            UserError: `rl.reward_model` names no reward model, or one of another vocabulary.
        """
        folder = str(recipe.rl.reward_model)
        if not is_reward_model(locate(folder)):
            raise UserError(
                f"rl.reward_model={folder}: it gives no score; wanted a run of zoo with train.loss=reward, its export, or a "
                "ForSequenceClassification of Hugging Face"
            )
        self.world, self.group, self.logprobs, self.align = world, group, logprobs, recipe.packing.align or 1
        recipe, theirs = build.assemble_other(
            recipe, "rl.reward_model", assembly.config.text.vocab_size, world, SCORING
        )
        self.recipe, self.processor = recipe, theirs.processor
        self.chunks = initial_weights.load_frozen(theirs, recipe, world)
        self.step = build.build_step(theirs, recipe, world)
        self.closing = closing_tokens(self.processor)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The score of each answer, on every rank. Every rank calls it, with the answers of its replica.

        Raises:
            UserError: a score that is not finite.
        """
        samples = [self._sample(rollout) for rollout in rollouts]
        lengths = [sample.length for sample in samples]
        budget = max(self.recipe.packing.budget, *(-(-length // self.align) * self.align for length in lengths), 1)
        bins = [tuple(places) for places in plan_bins(lengths, budget, self.align, lookahead=max(1, len(lengths)))]
        unit = self.recipe.parallel.pp if self.recipe.parallel.vpp > 1 else 1
        count = -(-max(1, *self.group.gather(len(bins))) // unit) * unit
        local: dict[tuple[int, int], float] = {}
        for places in spread(bins, count):
            batch = self._batch([samples[at] for at in places])
            values = self.logprobs(self.step, self.chunks, batch, self.world)
            if values is not None and self.world.counts_loss and self.world.cp_rank == 0:
                ends = [start + length - 1 for start, length in zip(batch.starts, batch.lengths, strict=True)]
                scores = (-values.flatten()[ends]).tolist()
                local |= {_key(rollouts[at]): score for at, score in zip(places, scores, strict=False)}
        everyone = {key: score for of_rank in self.group.gather(local) for key, score in of_rank.items()}
        if not all(map(math.isfinite, everyone.values())):
            raise UserError("rl.reward_model: it gives an answer a score that is not finite; look at its weights")
        return [everyone[_key(rollout)] for rollout in rollouts]

    def _sample(self, rollout: Rollout) -> Sample:
        prompt = rollout.prompt.sample
        tokens = rollout.token_ids[: len(rollout.token_ids) - rollout.finished]
        media = self.processor.media_ids  # there is none behind such a token in an answer
        count = next((at for at, token in enumerate(tokens) if token in media), len(tokens))
        ids = torch.cat([prompt.input_ids, prompt.input_ids.new_tensor([*tokens[:count], *self.closing])])
        return replace(prompt, input_ids=ids, labels=ids, weights=None)

    def _batch(self, samples: Sequence[Sample]) -> MicroBatch:
        if not samples:  # to keep a rank in step
            media = self.processor.media_ids
            ids = torch.full((2,), next(token for token in range(len(media) + 1) if token not in media))
            samples = [Sample(ids, ids)]
        return make_batch(samples, "thd", self.align, self.recipe.packing.pad_to, self.processor.pad_id)


def closing_tokens(processor: Processor) -> list[int]:
    """What the chat template puts behind the last answer: its end token, and whatever follows."""
    rows = [Row(messages=(Message("user", "."), Message("assistant", answer))) for answer in STAND_INS]
    first, second = (
        processor.encode(row, video_fps=1.0, max_frames=1, labels="last").input_ids.tolist()[::-1] for row in rows
    )
    same = next(at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    tokens: list[int] = first[:same][::-1]
    return tokens


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.prompt.number, rollout.number
