"""Bad steps, the end of a run for their sake, and a detector that resumes from another's state."""

import json
import math
from dataclasses import replace

import pytest

from zoo.config.schema import TrainConfig
from zoo.training.bad_steps.detector import BadStep, BadStepDetector

TRAIN = TrainConfig(spike=10.0, spike_after=20, bad_steps=3)


def after(losses: list[float], train: TrainConfig = TRAIN) -> BadStepDetector:
    detector = BadStepDetector(train)
    for loss in losses:
        assert detector.check(loss, 1.0) is None
    return detector


def noisy(count: int, level: float = 2.0) -> list[float]:
    """Losses with a median of `level` and a spread of 0.1 * 1.4826."""
    return [level + 0.1 * (number % 3 - 1) + 0.1 * (number % 2) * (number % 3 - 1) for number in range(count)]


@pytest.mark.parametrize(
    ("loss", "norm", "cause"),
    [(math.nan, 1.0, "loss"), (math.inf, math.nan, "loss"), (2.0, math.inf, "gradient"), (2.0, math.nan, "gradient")],
)
def test_numbers_that_are_not_finite(loss: float, norm: float, cause: str) -> None:
    detector = BadStepDetector(TRAIN)
    found = detector.check(loss, norm)
    assert found is not None and found.cause == cause and str(loss if cause == "loss" else norm) in found.why
    assert detector.counts == {cause: 1}


def test_a_spike_is_far_above_the_median_in_spreads_and_in_nats() -> None:
    detector = after(noisy(60))
    assert detector.check(2.9, 1.0) is None  # many spreads, but less than a nat
    found = detector.check(5.0, 1.0)
    assert found is not None and found.cause == "spike"
    assert found.why.startswith("the loss is 5, over 3.") and "(train.spike=10)" in found.why
    assert after([2.0 + number % 5 for number in range(60)]).check(7.0, 1.0) is None  # it is as noisy as that


def test_the_rule_of_a_recipe_that_names_none() -> None:
    """After 100 good steps, more than 10 spreads of the last 128 ones and more than a nat above their median."""
    plain = TrainConfig()
    assert after([2.0] * 99, plain).check(50.0, 1.0) is None
    steady = after([2.0] * 100, plain)
    assert steady.check(2.99, 1.0) is None and steady.check(3.02, 1.0) is not None
    restless = [2.0 + 0.1 * (number % 3 - 1) for number in range(126)]  # spread 0.14826
    assert after(restless, plain).check(3.47, 1.0) is None
    assert after(restless, plain).check(3.50, 1.0) is not None
    risen = after([*[2.0] * 200, *[2.9] * 65], plain)  # the median of the last 128 is the new one
    assert risen.check(3.8, 1.0) is None
    almost = after([*[2.0] * 200, *[2.9] * 63], plain)
    assert almost.check(3.8, 1.0) is not None
    assert BadStepDetector(plain).limit == 20 and BadStepDetector(plain).span == 80
    assert after(noisy(19)).check(50.0, 1.0) is None and after(noisy(20)).check(50.0, 1.0) is not None
    assert after(noisy(200), replace(TRAIN, spike=0.0)).check(50.0, 1.0) is None


def test_bad_steps_do_not_move_the_median() -> None:
    detector = after(noisy(60))
    for _ in range(100):
        found = detector.check(9.0, 1.0)
        assert found is not None and found.cause == "spike"
        assert detector.check(2.0, 1.0) is None


SKIP = replace(TRAIN, on_bad_step="skip", skip_limit=10)
TAKE = replace(SKIP, on_new_level="take")


def test_a_level_that_has_shifted_is_taken_after_so_many_steps() -> None:
    detector = after(noisy(200), TAKE)
    shifted = noisy(60, 7.0)
    found = [detector.check(loss, 1.0) for loss in shifted]
    assert [bad is not None for bad in found] == [True] * 10 + [False] * 50
    assert detector.counts == {"spike": 10} and not detector.ends and detector.new_level is None
    assert detector.check(30.0, 1.0) is not None, "bad steps are found at the new level, too"
    levels = []
    again = after(noisy(200), TAKE)
    for loss in shifted[:12]:
        again.check(loss, 1.0)
        levels.append(again.new_level)
    assert levels[9] == pytest.approx(7.0, abs=0.2) and levels.count(None) == 11


@pytest.mark.parametrize(
    ("train", "place", "loss", "norm"),
    [
        *(
            (train, *case)
            for train in (SKIP, TAKE)
            for case in ((0, math.nan, 1.0), (4, math.inf, 1.0), (9, 7.0, math.nan))
        ),
        (SKIP, 0, 7.0, 1.0),  # a level that has shifted, where the recipe takes none
    ],
)
def test_what_is_no_level_ends_the_run(train: TrainConfig, place: int, loss: float, norm: float) -> None:
    detector = after(noisy(200), train)
    for number in range(10):
        assert not detector.ends
        bad = detector.check(*(loss, norm) if number == place else (7.0, 1.0))
        assert bad is not None and detector.new_level is None
    assert detector.ends


@pytest.mark.parametrize("train", [SKIP, TAKE, TRAIN], ids=["skip", "take", "stop"])
@pytest.mark.parametrize("pattern", ["ab", "aab", "abb", "aaab"])
def test_losses_that_alternate_between_two_levels_end_the_run(train: TrainConfig, pattern: str) -> None:
    train = replace(train, skip_limit=10)
    detector = after(noisy(200), train)
    for step in range(200):
        detector.check(7.0 if pattern[step % len(pattern)] == "b" else 2.0, 1.0)
        if detector.ends:
            break
    assert detector.ends and detector.counts == {"spike": 10} and step < 40 and not detector.row_ends


def test_rare_bad_steps_never_end_a_run() -> None:
    detector = after(noisy(200), SKIP)
    for step in range(1000):
        detector.check(7.0 if step % 5 == 0 else 2.0, 1.0)
        assert not detector.ends
    assert detector.counts == {"spike": 200}


@pytest.mark.parametrize("low", [5, 11, 20, 29, 60, 129])
def test_levels_that_change_again_and_again_are_not_taken_for_ever(low: int) -> None:
    """At most about twice skip_limit of any 4 * skip_limit steps are left out, or the run ends."""
    detector, skipped = after(noisy(200), TAKE), []
    for step in range(2000):
        skipped.append(detector.check(7.0 if step % (10 + low) < 10 else 2.0, 1.0) is not None)
        if detector.ends:
            break
    assert sum(skipped) <= 20 + len(skipped) / 4


def resumed(first: BadStepDetector, train: TrainConfig) -> BadStepDetector:
    """Another detector with the state of the first, as a file holds it."""
    second = BadStepDetector(train)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return second


def test_a_resumed_run_counts_the_last_steps_on() -> None:
    first = after(noisy(200), SKIP)
    for step in range(16):
        first.check((2.0, 7.0)[step % 2], 1.0)
    second = resumed(first, SKIP)
    for detector in (first, second):
        ends = [detector.check(loss, 1.0) is not None and detector.ends for loss in (2.0, 7.0, 2.0, 7.0)]
        assert ends == [False, False, False, True]
    assert second.state_dict() == first.state_dict()
    third = resumed(first, SKIP)  # a run that was stopped may have as many again
    assert not third.ends and third.check(7.0, 1.0) is not None and not third.ends


def test_a_resumed_run_counts_on_towards_the_new_level() -> None:
    first = after(noisy(200), TAKE)
    for loss in noisy(6, 7.0):
        first.check(loss, 1.0)
    second = resumed(first, TAKE)
    for detector in (first, second):
        assert [detector.check(7.0, 1.0) is None for _ in range(5)] == [False] * 4 + [True]
    assert second.state_dict() == first.state_dict()


def test_the_run_stops_after_so_many_in_a_row() -> None:
    detector = BadStepDetector(TRAIN)
    ends = []
    for loss in (math.nan, math.nan, 1.0, math.nan, math.nan, math.nan):
        detector.check(loss, 1.0)
        ends.append(detector.ends)
    assert ends == [False, False, False, False, False, True]
    assert detector.counts == {"loss": 5}
    skipping = BadStepDetector(replace(TRAIN, on_bad_step="skip", skip_limit=50))
    for number in range(50):
        assert not skipping.ends, number
        assert isinstance(skipping.check(math.nan, 1.0), BadStep)
    assert skipping.ends


def test_a_detector_resumes_from_another_s_state() -> None:
    first = after(noisy(60))
    first.check(math.nan, 1.0)
    second = resumed(first, TRAIN)
    assert second.state_dict() == first.state_dict() and second.in_a_row == 1
    for detector in (first, second):
        assert detector.check(9.0, 1.0) is not None
    assert second.counts == first.counts == {"loss": 1, "spike": 1}
    first.check(math.nan, 1.0)
    assert first.ends and not resumed(first, TRAIN).ends and resumed(first, TRAIN).in_a_row == 0
    BadStepDetector(TRAIN).load_state_dict({})


def test_steps_without_labels_are_counted_and_leave_the_window_as_it_is() -> None:
    detector = after(noisy(60))
    for _ in range(200):
        found = detector.check(math.nan, 0.0, unlabelled="no row of it has a token to learn")
        assert found is not None and found.cause == "labels" and not detector.ends
    assert detector.check(2.2, 1.0) is None
    found = detector.check(9.0, 1.0)
    assert found is not None and found.cause == "spike" and "2 was the median of the last 61 good steps" in found.why
    assert detector.counts == {"labels": 200, "spike": 1}
