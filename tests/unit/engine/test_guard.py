"""What a bad step is, when the run stops for it, and that a guard goes on where another one was."""

import math
from dataclasses import replace

import pytest

from zoo.config.schema import TrainConfig
from zoo.engine.guard import Bad, Guard

TRAIN = TrainConfig(spike=10.0, spike_after=20, bad_steps=3)


def after(losses: list[float], train: TrainConfig = TRAIN) -> Guard:
    guard = Guard(train)
    for loss in losses:
        assert guard.judge(loss, 1.0) is None
    return guard


def noisy(count: int, level: float = 2.0) -> list[float]:
    """Losses with a median of `level` and a spread of 0.1 * 1.4826."""
    return [level + 0.1 * (number % 3 - 1) + 0.1 * (number % 2) * (number % 3 - 1) for number in range(count)]


@pytest.mark.parametrize(
    ("loss", "norm", "cause"),
    [
        (math.nan, 1.0, "loss"),
        (math.inf, math.nan, "loss"),
        (2.0, math.inf, "gradient"),
        (2.0, math.nan, "gradient"),
    ],
)
def test_numbers_that_are_not_finite(loss: float, norm: float, cause: str) -> None:
    guard = Guard(TRAIN)
    found = guard.judge(loss, norm)
    assert found is not None and found.cause == cause and str(loss if cause == "loss" else norm) in found.why
    assert guard.counts == {cause: 1}


def test_a_spike_is_far_above_the_median_in_spreads_and_in_nats() -> None:
    guard = after(noisy(60))
    assert guard.judge(2.9, 1.0) is None  # many spreads, but less than a nat
    found = guard.judge(5.0, 1.0)
    assert found is not None and found.cause == "spike"
    assert found.why.startswith("the loss is 5, over 3.") and "(train.spike=10)" in found.why
    assert after([2.0 + number % 5 for number in range(60)]).judge(7.0, 1.0) is None  # it is as noisy as that


def test_no_spike_is_looked_for_early_or_where_it_is_switched_off() -> None:
    assert after(noisy(19)).judge(50.0, 1.0) is None
    assert after(noisy(20)).judge(50.0, 1.0) is not None
    assert after(noisy(200), replace(TRAIN, spike=0.0)).judge(50.0, 1.0) is None


def test_bad_steps_do_not_move_the_median() -> None:
    guard = after(noisy(60))
    causes = [getattr(guard.judge(9.0, 1.0), "cause", None) for _ in range(100)]
    assert causes == ["spike"] * 100


def test_the_run_stops_after_so_many_in_a_row() -> None:
    guard = Guard(TRAIN)
    ends = []
    for loss in (math.nan, math.nan, 1.0, math.nan, math.nan, math.nan):
        guard.judge(loss, 1.0)
        ends.append(guard.ends)
    assert ends == [False, False, False, False, False, True]
    assert guard.counts == {"loss": 5}
    skipping = Guard(replace(TRAIN, on_bad_step="skip"))
    for _ in range(50):
        assert isinstance(skipping.judge(math.nan, 1.0), Bad) and not skipping.ends


def test_a_guard_goes_on_where_another_one_was() -> None:
    first = after(noisy(60))
    first.judge(math.nan, 1.0)
    second = Guard(TRAIN)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() and second.in_a_row == 1
    for guard in (first, second):
        assert guard.judge(9.0, 1.0) is not None
    assert second.counts == first.counts == {"loss": 1, "spike": 1}
    first.judge(math.nan, 1.0)
    assert first.ends
    third = Guard(TRAIN)
    third.load_state_dict(first.state_dict())
    assert not third.ends and third.in_a_row == 0  # a run that was stopped may have as many again
    Guard(TRAIN).load_state_dict({})
