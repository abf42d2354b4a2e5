"""Sampled answers as packed rows: what is a label, what it weighs, and what is left out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.data.sample import IGNORE, Sample
from zoo.rollouts.batches import Answer, AnswerPacker
from zoo.rollouts.engine import Rollout, RolloutPrompt

MEDIUM = 9
PROCESSOR: Any = SimpleNamespace(media_ids=frozenset({0, MEDIUM}), pad_id=1)


def packer(*overrides: str) -> AnswerPacker:
    fixed = ["size=tiny", "hardware=cpu", "packing.budget=24", "rl.max_new_tokens=8", "packing.align=4"]
    return AnswerPacker(validate(load_recipe("qwen3_vl_grpo", [*fixed, *overrides]), 1), PROCESSOR, replay=False)


def answer(tokens: tuple[int, ...], advantage: float = 1.0, trained: bool = True, prompt: int = 3) -> Answer:
    sample = Sample(torch.arange(2, 2 + prompt), torch.full((prompt,), IGNORE))
    row: Any = SimpleNamespace(kind="text", source="rows.jsonl:1")
    logprobs = tuple(-float(number) for number in range(1, len(tokens) + 1))
    return Answer(Rollout(RolloutPrompt(0, row, sample), 0, tokens, logprobs, True, ""), advantage, trained)


def test_an_answer_stands_behind_its_prompt_with_its_advantage_and_log_probabilities() -> None:
    answers = [answer((5, 6), advantage=0.5), answer((7, 8, 5), advantage=-1.0)]
    made = packer()
    bins = made.bins(answers)
    (batch,) = made.batches(answers, bins, 1)
    assert batch.policy is not None and batch.lengths == (5, 6)
    chosen = batch.labels[0] != IGNORE
    assert batch.labels[0, chosen].tolist() == [5, 6, 7, 8, 5] == batch.input_ids[0, chosen].tolist()
    assert batch.policy.rollout[0, chosen].tolist() == [-1, -2, -1, -2, -3]
    assert batch.policy.advantages[0, chosen].tolist() == [0.5, 0.5, -1, -1, -1]
    assert batch.weights is not None
    assert batch.weights[0, chosen].tolist() == pytest.approx([1 / 2] * 2 + [1 / 3] * 3), "a mean over each answer"


def test_an_answer_ends_before_a_token_that_would_stand_for_a_medium() -> None:
    made, answers = packer("rl.length_norm=token"), [answer((5, MEDIUM, 6)), answer((MEDIUM,))]
    (batch,) = made.batches(answers, made.bins(answers), 1)
    assert batch.lengths == (4,) and made.weight(answers) == 1.0


@pytest.mark.parametrize(("norm", "weight"), [("token", 2.0), ("sequence", 2.0), ("constant", 2.0)])
def test_a_masked_answer_has_no_labels_but_counts(norm: str, weight: float) -> None:
    made, answers = packer(f"rl.length_norm={norm}"), [answer((5, 6)), answer((7,) * 8, trained=False)]
    (batch,) = made.batches(answers, made.bins(answers), 1)
    assert batch.lengths == (5,) and made.weight(answers) == weight


def test_bins_hold_the_budget_and_are_filled_up_with_rows_that_count_nothing() -> None:
    made, answers = packer(), [answer((5,) * 8, prompt=4) for _ in range(3)]
    bins = made.bins(answers)
    assert sorted(at for places in bins for at in places) == [0, 1, 2] and all(len(places) <= 2 for places in bins)
    batches = made.batches(answers, bins, 4)
    assert len(batches) == 4 and sum(batch.filler for batch in batches) == 1
    filler = next(batch for batch in batches if batch.filler)
    assert filler.loss_weight == 0 and not {0, MEDIUM} & set(filler.input_ids.flatten().tolist()[:2])
