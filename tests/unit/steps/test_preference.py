"""Losses of preference pairs from log-probabilities at hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.preference import plain_loss

from zoo.steps.objectives.preference import METRICS, PreferenceLoss

LOGPROBS = torch.tensor([-3.0, -9.0, -12.0, -4.0, -1.0, -1.5, -0.02, -40.0])
LABELS = torch.tensor([2.0, 3.0, 6.0, 2.0, 4.0, 4.0, 1.0, 5.0])
REFERENCE = torch.tensor([-4.0, -8.0, -11.0, -6.0, -2.0, -1.0, -1.0, -30.0])


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo"])
def test_losses_and_gradients_are_those_written_out(kind: str) -> None:
    mine, plain = (LOGPROBS.clone().requires_grad_() for _ in range(2))
    losses, metrics = PreferenceLoss(kind, 0.3, simpo_gamma=0.7)(mine, LABELS, REFERENCE)
    losses.mean().backward()
    wanted = plain_loss(kind, plain, LABELS, REFERENCE, beta=0.3, gamma=0.7)
    wanted.backward()
    assert float(losses.mean().detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-5, atol=1e-7)
    values = LOGPROBS - REFERENCE if kind in ("dpo", "ipo") else LOGPROBS / LABELS
    rewards = 0.3 * values.view(-1, 2).T
    torch.testing.assert_close(torch.stack([metrics[name] for name in METRICS[:2]]), rewards)
    assert metrics["rewards/accuracies"].tolist() == (rewards[0] > rewards[1]).float().tolist()


def test_losses_are_those_of_trl() -> None:
    """TRL's own methods, where it is installed."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    settings = {"alpha": 0.0, "beta": 0.3, "label_smoothing": 0.1, "loss_type": "simpo", "simpo_gamma": 0.7}
    trainer = SimpleNamespace(**settings, accelerator=SimpleNamespace(device="cpu"))
    mean = (LOGPROBS / LABELS).view(-1, 2).T
    wanted, chosen, rejected = CPOTrainer.cpo_loss(trainer, *mean)
    losses, metrics = PreferenceLoss("simpo", 0.3, 0.1, 0.7)(LOGPROBS, LABELS, None)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(metrics["rewards/chosen"], chosen)
    torch.testing.assert_close(metrics["rewards/rejected"], rejected)
    ratio = ORPOTrainer.odds_ratio_loss(trainer, *mean)[0]
    losses, _ = PreferenceLoss("orpo", 0.3)(LOGPROBS, LABELS, None)
    torch.testing.assert_close(losses, -mean[0] - ratio)


def test_smoothing_weighs_both_ways_round() -> None:
    """Conservative DPO: the loss of the pair as it is and of the pair turned round."""
    turned = LOGPROBS.view(-1, 2).flip(1).flatten(), REFERENCE.view(-1, 2).flip(1).flatten()
    one = PreferenceLoss("dpo", 0.3)(LOGPROBS, LABELS, REFERENCE).losses
    other = PreferenceLoss("dpo", 0.3)(turned[0], LABELS, turned[1]).losses
    found = PreferenceLoss("dpo", 0.3, 0.2)(LOGPROBS, LABELS, REFERENCE).losses
    torch.testing.assert_close(found, 0.8 * one + 0.2 * other)
    losses, metrics = PreferenceLoss("dpo", 0.1)(REFERENCE, LABELS, REFERENCE)  # the policy is the reference: a coin
    assert losses.tolist() == pytest.approx([math.log(2)] * 4) and metrics["rewards/accuracies"].sum() == 0


def test_certain_answers_have_finite_gradients() -> None:
    sure = torch.tensor([0.0, -50.0]).requires_grad_()
    losses, _ = PreferenceLoss("orpo", 0.1)(sure, torch.ones(2), None)
    losses.sum().backward()
    assert bool(losses.isfinite().all()) and bool(sure.grad.isfinite().all())


def test_answers_that_are_no_pairs_and_a_missing_reference_are_refused() -> None:
    with pytest.raises(ValueError, match="3 answers; wanted pairs"):
        PreferenceLoss("simpo", 0.1)(LOGPROBS[:3], LABELS[:3], None)
    with pytest.raises(ValueError, match="needs the reference's log-probabilities"):
        PreferenceLoss("dpo", 0.1)(LOGPROBS, LABELS, None)
