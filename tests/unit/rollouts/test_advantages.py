"""Advantages against the papers' formulas written out, and against TRL's numbers."""

import pytest
import torch
from torch import Tensor

from zoo.rollouts.advantages import AdvantageRule, overlong_penalty

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 2.0, -1.0, 0.25]])
LENGTHS = torch.tensor([[10, 20, 30, 40], [16, 17, 18, 20], [1, 1, 1, 1]])
ALL = torch.ones(3, 4, dtype=torch.bool)


def rule(algorithm: str = "grpo", *, std_norm: bool = True, **settings: int | bool) -> AdvantageRule:
    return AdvantageRule(algorithm, std_norm, 40, **settings)  # type: ignore[arg-type]


def written_out(rewards: Tensor, algorithm: str, std_norm: bool) -> list[list[float]]:
    rows = []
    for group in rewards.double().tolist():
        size = len(group)
        mean = sum(group) / size
        std = (sum((reward - mean) ** 2 for reward in group) / (size - 1)) ** 0.5 + 1e-4 if std_norm else 1.0
        if algorithm == "rloo":
            rows.append([(reward - (sum(group) - reward) / (size - 1)) / std for reward in group])
        else:
            rows.append([(reward - mean) / std for reward in group])
    return rows


@pytest.mark.parametrize("std_norm", [True, False])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo", "rloo", "cispo"])
def test_advantages_are_the_formula(algorithm: str, std_norm: bool) -> None:
    found = rule(algorithm, std_norm=std_norm)(REWARDS, LENGTHS, ALL)
    wanted = torch.tensor(written_out(REWARDS, algorithm, std_norm), dtype=torch.float64)
    torch.testing.assert_close(found.values, wanted, rtol=1e-12, atol=1e-12)
    assert found.informative.tolist() == [True, False, True] and bool(found.trained.all())


def test_advantages_are_those_of_trl() -> None:
    """TRL 1.16.0's GRPOTrainer with scale_rewards=group."""
    wanted = [
        [0.8658754168603869, -0.8658754168603869, -0.8658754168603869, 0.8658754168603869],
        [0.0, 0.0, 0.0, 0.0],
        [-0.2503976422226726, 1.3521472680024318, -1.0516700973352247, -0.05007952844453451],
    ]
    torch.testing.assert_close(rule()(REWARDS, LENGTHS, ALL).values, torch.tensor(wanted).double(), rtol=0, atol=1e-7)


def test_long_answers_lose_up_to_one() -> None:
    """DAPO's equation 13, of 40 tokens at most with 16 of them as its buffer."""
    penalty = overlong_penalty(torch.tensor([0, 24, 28, 32, 40, 50]), 40, 16)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    found = rule("dapo", overlong_buffer=16)(REWARDS, LENGTHS, ALL)
    assert found.rewards[0].tolist() == [1.0, 0.0, -0.375, 0.0]
    assert found.values[0].tolist() == pytest.approx(written_out(found.rewards, "dapo", True)[0])
    equal = torch.zeros(1, 4)  # all wrong: dynamic sampling replaces the group, though its lengths differ
    assert rule("dapo", overlong_buffer=16)(equal, LENGTHS[:1], ALL[:1]).informative.tolist() == [False]


def test_cut_answers_count_in_the_baseline_and_not_in_the_loss() -> None:
    finished = torch.tensor([[True, False, True, True], [True] * 4, [False] * 4])
    found = rule(mask_truncated=True)(REWARDS, LENGTHS, finished)
    torch.testing.assert_close(found.trained, finished, rtol=0, atol=0)
    torch.testing.assert_close(found.values, rule()(REWARDS, LENGTHS, finished).values)
    assert found.informative.tolist() == [True, False, False]
    assert bool(rule()(REWARDS, LENGTHS, finished).trained.all())


def test_rounding_gives_equal_rewards_no_advantage() -> None:
    rewards = torch.full((1, 3), 0.1, dtype=torch.float64)
    found = rule("rloo", std_norm=False)(rewards, torch.ones(1, 3), torch.ones(1, 3))
    assert found.values.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("rewards", [torch.zeros(3, 1), torch.zeros(4), torch.tensor([[1.0, float("nan")]])])
def test_refuses_what_has_no_advantage(rewards: Tensor) -> None:
    with pytest.raises(ValueError, match=r"2 answers or more|not finite"):
        rule()(rewards, torch.ones_like(rewards), torch.ones_like(rewards))
