"""Sampled answers with their advantages as packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.loading.batches import make_batch
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, MicroBatch, PolicyTokens, Sample
from zoo.packing import plan_bins
from zoo.packing.binning import Bin, spread
from zoo.rollouts.engine import Rollout
from zoo.steps.objectives.policy import answer_count, label_weight


@dataclass(frozen=True)
class Answer:
    """An answer that is trained on."""

    rollout: Rollout
    advantage: float
    trained: bool  # False: it counts in the loss's denominator alone


class AnswerPacker:
    """Packs a rank's answers of one update; `recipe`, `processor`: of the run."""

    def __init__(self, recipe: Recipe, processor: Processor, *, replay: bool) -> None:
        """`replay`: training takes the experts that the rollout took."""
        self.recipe, self.processor, self.replay = recipe, processor, replay
        self.align, self.media = recipe.packing.align or 1, processor.media_ids

    def weight(self, answers: Sequence[Answer]) -> float:
        """What the answers add to the number that the step's loss is divided by."""
        norm = str(self.recipe.rl.length_norm)
        return sum(answer_count(norm, self._length(a.rollout), masked=not a.trained) for a in answers)

    def bins(self, answers: Sequence[Answer]) -> list[Bin]:
        """Answers of each micro-batch; those without loss are left out."""
        kept = [at for at, answer in enumerate(answers) if answer.trained and self._length(answer.rollout)]
        lengths = [answers[at].rollout.prompt.sample.length + self._length(answers[at].rollout) for at in kept]
        planned = plan_bins(lengths, self.recipe.packing.budget, self.align, lookahead=max(1, len(lengths)))
        return [tuple(kept[at] for at in places) for places in planned]

    def batches(self, answers: Sequence[Answer], bins: Sequence[Bin], count: int) -> list[MicroBatch]:
        """`count` micro-batches of the answers, with some that count nothing where there are not enough."""
        return [self._batch([answers[at] for at in places]) for places in spread(bins, count)]

    def _batch(self, answers: Sequence[Answer]) -> MicroBatch:
        if not answers:
            return self._filler()
        samples = [self._sample(answer.rollout) for answer in answers]
        batch = make_batch(samples, "thd", self.align, self.recipe.packing.pad_to, self.processor.pad_id)
        layout = batch.layout
        assert layout is not None
        advantages = [torch.full((sample.length,), a.advantage) for sample, a in zip(samples, answers, strict=True)]
        logprobs = [_behind(sample, a.rollout.logprobs) for sample, a in zip(samples, answers, strict=True)]
        by_token, drawn = (layout.pack_list(values, fill=0) for values in (advantages, logprobs))
        policy = PolicyTokens(by_token, drawn, experts=self._experts(batch, answers) if self.replay else None)
        return replace(batch, policy=policy)

    def _sample(self, rollout: Rollout) -> Sample:
        prompt, count = rollout.prompt.sample, self._length(rollout)
        tokens = prompt.input_ids.new_tensor(rollout.token_ids[:count])
        labels = torch.cat([torch.full_like(prompt.input_ids, IGNORE), tokens])
        weight = label_weight(str(self.recipe.rl.length_norm), count, self.recipe.rl.max_new_tokens)
        return replace(
            prompt,
            input_ids=torch.cat([prompt.input_ids, tokens]),
            labels=labels,
            weights=torch.full((len(labels),), weight),
            kind=rollout.prompt.row.kind,
            source=rollout.prompt.row.source,
        )

    def _length(self, rollout: Rollout) -> int:
        """Tokens of an answer up to the first one that would stand for a medium, which there is none of."""
        tokens = rollout.token_ids
        return next((at for at, token in enumerate(tokens) if token in self.media), len(tokens))

    def _experts(self, batch: MicroBatch, answers: Sequence[Answer]) -> Tensor:
        """(1, T, L, k) int64 experts of the packed row, -1 on padding."""
        first = answers[0].rollout.routing
        assert first is not None
        packed = torch.full((1, batch.total, *first.shape[1:]), -1)
        for answer, start, length in zip(answers, batch.starts, batch.lengths, strict=True):
            assert answer.rollout.routing is not None
            packed[0, start : start + length] = answer.rollout.routing[:length].long()
        return packed

    def _filler(self) -> MicroBatch:
        """Two tokens of text that count nothing."""
        token = next(token for token in range(len(self.media) + 1) if token not in self.media)
        ids = torch.full((2,), token)
        batch = make_batch([Sample(ids, ids)], "thd", self.align, self.recipe.packing.pad_to, self.processor.pad_id)
        zeros = torch.zeros(batch.input_ids.shape)
        return replace(batch, filler=True, sources=(), kinds=(), policy=PolicyTokens(zeros, zeros))


def _behind(sample: Sample, values: Sequence[float]) -> Tensor:
    """(L,) float32 values of a sample's last tokens, 0 before them."""
    count = int((sample.labels != IGNORE).sum())
    return torch.cat([torch.zeros(sample.length - count), torch.tensor(values[:count])])
