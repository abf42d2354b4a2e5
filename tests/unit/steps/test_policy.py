"""The policy's loss: TRL's numbers, the papers' formulas, and the same gradient however labels are cut."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zoo.steps.objectives import policy
from zoo.steps.objectives.policy import PolicyInputs, PolicyLoss, answer_count, label_weight

LENGTHS, MOST = (5, 3, 1, 4, 2, 5), 8  # tokens of six answers, and the most there might have been
ADVANTAGES = torch.tensor([1.25, -0.5, -0.75, 0.9, -1.4, 0.5], dtype=torch.float64)
PLACES = torch.arange(30, dtype=torch.float64).view(6, 5)
MASK = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]
NEW = -1.5 + torch.sin(PLACES * 1.7)
OLD = NEW - 0.45 * torch.cos(PLACES * 2.3)
REFERENCE = NEW - 0.3 * torch.sin(PLACES * 0.9)
ROLLOUT = OLD - 0.6 * torch.sin(PLACES * 1.1)
ENTROPY = 1 + 0.5 * torch.cos(PLACES * 0.7)
PROBE = torch.cos(PLACES)  # the gradient is compared by two sums, this times it and itself

# (loss type, level of the ratio) of TRL 1.16.0, what zoo calls it, clip_low, clip_high, kl, importance_cap, entropy;
# and by TRL's GRPOTrainer the loss, both sums of its gradient and the shares of labels that are clipped.
TRL = [
    (("grpo", "token"), ("grpo", "sequence"), (0.2, 0.2, 0.0, None, 0.0), (-0.0284474884, 0.0343302894, 0.0740412040), (0.1, 0.25)),
    (("grpo", "token"), ("grpo", "sequence"), (0.2, 0.2, 0.04, 2.0, 0.0), (-0.1151704101, -0.0492719357, 0.0681115282), (0.1, 0.25)),
    (("bnpo", "token"), ("grpo", "token"), (0.2, 0.2, 0.0, None, 0.0), (-0.3503209221, -0.1363209221, 0.0959907620), (0.1, 0.25)),
    (("dr_grpo", "token"), ("rloo", "constant"), (0.2, 0.2, 0.04, None, 0.0), (-0.1456420868, -0.0571027132, 0.0386668079), (0.1, 0.25)),
    (("dapo", "token"), ("dapo", "token"), (0.2, 0.28, 0.0, None, 0.0), (-0.3679209221, -0.1363209221, 0.0959907620), (0.1, 0.25)),
    (("dapo", "token"), ("dapo", "token"), (0.2, 0.28, 0.04, 1.5, 0.01), (-0.4128454664, -0.1987740871, 0.0773352722), (0.1, 0.25)),
    (("cispo", "token"), ("cispo", "token"), (1.0, 0.3, 0.0, None, 0.0), (0.5454242071, -0.3762858554, 0.1161945416), None),
    (("cispo", "token"), ("cispo", "token"), (1.0, 0.3, 0.04, 1.5, 0.0), (0.6698762480, -0.4127544131, 0.0630037202), None),
    (("grpo", "sequence"), ("gspo", "sequence"), (0.03, 0.04, 0.0, None, 0.0), (0.0065425076, -0.3410408257, 0.1265754277), None),
    (("dapo", "sequence"), ("gspo", "token"), (0.03, 0.04, 0.04, None, 0.0), (-0.3478222618, -0.5215027652, 0.1406115459), None),
]  # fmt: skip


def policy_loss(algorithm: str, settings: tuple) -> PolicyLoss:
    low, high, kl, cap, entropy = settings
    return PolicyLoss(algorithm, low, high, kl, entropy, cap, referenced=bool(kl))


def labels_of(answers: list[int], length_norm: str) -> tuple[PolicyInputs, Tensor]:
    """The labels of these answers, packed in this order, and (N,) their places in the padded batch."""
    places = torch.cat([torch.arange(LENGTHS[answer]) + 5 * answer for answer in answers])
    weights = [label_weight(length_norm, LENGTHS[answer], MOST) for answer in answers]
    lengths = torch.tensor([LENGTHS[answer] for answer in answers])
    segments = torch.arange(len(answers)).repeat_interleave(lengths)
    taken = (x.flatten()[places] for x in (OLD, ROLLOUT, REFERENCE))
    inputs = PolicyInputs(
        ADVANTAGES[answers][segments],
        torch.tensor(weights, dtype=torch.float64)[segments],
        segments,
        len(answers),
        *taken,
    )
    return inputs, places


def step_of(
    loss: PolicyLoss, length_norm: str, micro_batches: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss of a step of these micro-batches, (6, 5) its gradient, and its metrics."""
    logprobs = NEW.clone().requires_grad_()
    total, sums = torch.zeros(()), defaultdict(float)
    for answers in micro_batches:
        inputs, places = labels_of(answers, length_norm)
        losses, metrics = loss(logprobs.flatten()[places], ENTROPY.flatten()[places], inputs)
        total = total + losses.sum()
        for name, value in metrics.items():
            sums[name] = max(sums[name], float(value)) if name in loss.maxima else sums[name] + float(value)
    count = sum(answer_count(length_norm, LENGTHS[answer], masked=False) for part in micro_batches for answer in part)
    (total / count).backward()
    assert logprobs.grad is not None
    return (
        float(total.detach()) / count,
        logprobs.grad,
        {**loss.means(sums, count), **{name: sums[name] for name in loss.maxima}},
    )


@pytest.mark.parametrize(("trl", "name", "settings", "wanted", "clipped"), TRL)
def test_losses_are_those_of_trl(
    trl: tuple[str, str], name: tuple[str, str], settings: tuple, wanted: tuple, clipped: tuple | None
) -> None:
    """TRL's bounds for CISPO are of the ratio itself; its Dr. GRPO is GRPO's or RLOO's loss under length_norm=constant."""
    loss, gradient, metrics = step_of(policy_loss(name[0], settings), name[1], [[*range(6)]])
    assert (loss, float(gradient.sum()), float((gradient * PROBE).sum())) == pytest.approx(wanted, abs=1e-8)
    if settings[2]:
        assert metrics["kl"] == pytest.approx(0.01949785, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(1.0995883, abs=1e-6)
    if clipped is not None:
        assert (metrics["clipped/low"], metrics["clipped/high"]) == pytest.approx(clipped)


@pytest.mark.parametrize(("trl", "name", "settings", "wanted", "clipped"), TRL)
def test_the_numbers_are_what_trl_computes(
    trl: tuple[str, str], name: tuple[str, str], settings: tuple, wanted: tuple, clipped: tuple | None
) -> None:
    """TRL's own method, where it is installed."""
    trainers = pytest.importorskip("trl")
    low, high, kl, cap, entropy = settings
    logprobs, mask = NEW.clone().requires_grad_(), MASK.double()
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        loss_type=trl[0], importance_sampling_level=trl[1], beta=kl, epsilon_low=low,
        epsilon_high=1 + high if trl[0] == "cispo" else high, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=cap is not None, vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=MOST,
        accelerator=accelerator, _entropy_bonus_enabled=bool(entropy), entropy_coef=entropy, use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, ENTROPY, None),
    )  # fmt: skip
    ids = torch.zeros(6, 5, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask, "advantages": ADVANTAGES,
        "old_per_token_logps": OLD, "ref_per_token_logps": REFERENCE, "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (OLD - ROLLOUT).exp().clamp(max=cap or 1e9),
    }  # fmt: skip
    loss = trainers.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    sums = (float(loss), float(logprobs.grad.sum()), float((logprobs.grad * PROBE).sum()))
    assert sums == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("length_norm", ["token", "sequence", "constant"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_gradient_does_not_depend_on_micro_batches_or_order(algorithm: str, length_norm: str) -> None:
    loss = policy_loss(algorithm, (0.1, 0.15, 0.04, 2.0, 0.01))
    whole = step_of(loss, length_norm, [[*range(6)]])
    for micro_batches in ([[0, 1], [2, 3, 4, 5]], [[5, 2, 0], [4], [1, 3]], [[answer] for answer in range(6)]):
        cut = step_of(loss, length_norm, micro_batches)
        assert cut[0] == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-14)
        assert cut[2] == pytest.approx(whole[2], rel=1e-5)


def test_context_parallel_ranks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """GSPO's ratio is that of the whole answer on ranks that have every other label of it; one has none of the third answer."""
    loss, given = policy_loss("gspo", (0.03, 0.04, 0.04, 2.0, 0.01)), []
    inputs, places = labels_of([*range(6)], "sequence")
    monkeypatch.setattr(policy, "sum_over_context", lambda sums, group: given.append(sums) or sum(given))
    halves = [slice(0, None, 2), slice(1, None, 2)]
    logprobs = NEW.clone().requires_grad_()
    for turn in range(2):  # by the second time, the sums of both are known
        for half in halves:
            taken = {
                name: getattr(inputs, name)[half]
                for name in ("advantages", "weights", "segments", "old", "rollout", "reference")
            }
            if turn:
                monkeypatch.setattr(policy, "sum_over_context", lambda *_: given[0] + given[1])
            losses, _ = loss(
                logprobs.flatten()[places[half]], ENTROPY.flatten()[places[half]], replace(inputs, **taken)
            )
            if turn:
                losses.sum().backward()
    logprobs_grad, whole = logprobs.grad, step_of(loss, "sequence", [[*range(6)]])[1]
    assert logprobs_grad is not None
    torch.testing.assert_close(logprobs_grad / 6, whole, rtol=1e-12, atol=1e-14)


def test_gspo_is_the_formula_of_whole_answers() -> None:
    """Equation 5 of its paper, with the gradient through the ratio of whole answers."""
    logprobs = NEW.clone().requires_grad_()
    ratio = (((logprobs - OLD) * MASK).sum(1) / MASK.sum(1)).exp()
    wanted = -torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.97, 1.04) * ADVANTAGES).mean()
    wanted.backward()
    loss, gradient, _ = step_of(policy_loss("gspo", (0.03, 0.04, 0.0, None, 0.0)), "sequence", [[*range(6)]])
    assert loss == pytest.approx(float(wanted), abs=1e-12)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo", "rloo", "cispo"])
def test_first_update_has_the_gradient_of_reinforce(algorithm: str) -> None:
    """Without log-probabilities of before, each ratio is 1: the gradient is -A of each label's log-probability."""
    inputs, places = labels_of([*range(6)], "token")
    logprobs = NEW.flatten()[places].requires_grad_()
    loss = policy_loss(algorithm, (0.2, 0.2, 0.0, None, 0.0))
    losses, metrics = loss(logprobs, None, replace(inputs, old=None))
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -inputs.advantages)
    assert float(metrics["clip_low"]) == float(metrics["clip_high"]) == 0
    assert float(metrics["ratio"]) == pytest.approx(len(places))


def test_weights_against_the_rollout_are_capped_and_told() -> None:
    """Four labels, of which the rollout gave one a tenth of the trainer's probability."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    rollout = logprobs.detach() - torch.tensor([0.0, math.log(10), -math.log(2), 0.0])
    inputs = PolicyInputs(torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64), 1, None, rollout)
    loss = PolicyLoss("grpo", 0.2, 0.2, importance_cap=2.0)
    losses, metrics = loss(logprobs, None, inputs)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([1.0, 2.0, 0.5, 1.0]))
    shown = loss.means({name: float(value) for name, value in metrics.items()}, 1.0)
    assert shown["importance/capped"] == 0.25 and shown["importance/mean"] == pytest.approx((1 + 10 + 0.5 + 1) / 4)
    assert shown["logprob_difference/mean"] == pytest.approx((math.log(10) + math.log(2)) / 4)
    assert float(metrics["importance_max"]) == pytest.approx(10)
    assert float(metrics["difference_max"]) == pytest.approx(math.log(10))
    assert "kl" not in shown and "importance/capped" not in PolicyLoss("grpo", 0.2, 0.2).means(metrics, 1.0)


def test_far_ratios_and_empty_ranks_give_finite_numbers() -> None:
    logprobs = torch.tensor([-1.0, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, -1.0])
    inputs = PolicyInputs(torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([0, 1]), 2, old, old, old)
    for algorithm in ("grpo", "gspo", "cispo"):
        losses, metrics = policy_loss(algorithm, (0.2, 0.2, 0.1, 2.0, 0.0))(logprobs, None, inputs)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert bool(gradient.isfinite().all()) and all(bool(value.isfinite()) for value in metrics.values())
        none = torch.zeros(0, requires_grad=True)
        empty = PolicyInputs(none, none, torch.zeros(0, dtype=torch.int64), 2, none, none, none)
        losses, metrics = policy_loss(algorithm, (0.2, 0.2, 0.1, 2.0, 0.0))(none, none, empty)
        assert losses.shape == (0,) and all(float(value) == 0 for value in metrics.values())


def test_masked_answers_count_in_the_mean_over_answers_alone() -> None:
    assert [answer_count(norm, 7, masked=True) for norm in ("token", "sequence", "constant")] == [0, 1, 1]
    assert [answer_count(norm, 7, masked=False) for norm in ("token", "sequence", "constant")] == [7, 1, 1]
    assert label_weight("sequence", 0, 8) == 1.0
