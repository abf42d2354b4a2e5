"""Every update's learning rate is the one that docs/recipes.md writes down, and none of them is 0."""

import math
from dataclasses import replace as with_parts
from types import SimpleNamespace
from typing import Any

import pytest

from zoo.config.schema import TrainConfig
from zoo.errors import ConfigError
from zoo.training.dataloader import total_steps
from zoo.training.optimization import build_schedule, set_schedule_length

LR, MIN_LR, SCALE = 2e-3, 1e-4, 0.1


class Groups:
    """An optimizer as the schedule sees it: one group as the recipe says, one of a part with lr_scale."""

    def __init__(self) -> None:
        scaled = {"max_lr": LR * SCALE, "min_lr": MIN_LR * SCALE, "wd_mult": 0.0}
        self.param_groups: list[dict[str, Any]] = [scaled, {}]


def wanted(
    update: int, steps: int, warm_up: int, schedule: str, decay: int | None = None, min_lr: float = MIN_LR
) -> float:
    """The rate of update k, from 1."""
    if update <= warm_up:
        return LR * update / warm_up
    if schedule == "constant":
        return LR
    if schedule == "wsd":
        decay = min(max(steps // 10, 1), steps - warm_up) if decay is None else decay
        share = max(0, update - (steps - decay)) / (decay + 1)
    else:
        share = (update - warm_up) / (steps + 1 - warm_up)
    if schedule == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return LR - (LR - min_lr) * share


def rates(steps: int, warm_up: int, **train: Any) -> list[tuple[float, ...]]:
    optimizer = Groups()
    schedule = build_schedule(optimizer, TrainConfig(lr=LR, warmup_steps=warm_up, **train), steps)
    found = []
    for _ in range(steps):
        schedule.step(increment=1)
        found.append(tuple(group["lr"] for group in optimizer.param_groups))
    return found


@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear", "wsd"])
@pytest.mark.parametrize(
    ("steps", "warm_up"),
    [(1, 0), (1, 1), (1, 5), (2, 1), (5, 5), (5, 4), (5, 6), (7, 0), (100, 10), (100, 95), (20, 40)],
)
def test_every_update_s_rate(steps: int, warm_up: int, schedule: str) -> None:
    found = rates(steps, warm_up, min_lr=MIN_LR, schedule=schedule)
    for update, (scaled, plain) in enumerate(found, 1):
        want = wanted(update, steps, warm_up, schedule=schedule)
        assert plain == pytest.approx(want, rel=1e-12), update
        assert scaled == pytest.approx(SCALE * want, rel=1e-12), update
        if update == warm_up:
            assert plain == LR
    assert all(rate > 0 for both in rates(steps, warm_up, schedule=schedule) for rate in both)


@pytest.mark.parametrize(("steps", "warm_up", "decay"), [(1, 0, 1), (8, 0, 8), (9, 4, 5), (10, 2, 3), (30, 1, 1)])
def test_every_update_s_rate_with_a_decay_of_its_own_length(steps: int, warm_up: int, decay: int) -> None:
    found = rates(steps, warm_up, min_lr=MIN_LR, schedule="wsd", decay_steps=decay)
    want = [wanted(update, steps, warm_up, schedule="wsd", decay=decay) for update in range(1, steps + 1)]
    assert [plain for _, plain in found] == pytest.approx(want, rel=1e-12)
    assert [scaled for scaled, _ in found] == pytest.approx([SCALE * rate for rate in want], rel=1e-12)
    assert sum(rate < LR * (1 - 1e-9) for rate in want[warm_up:]) == decay


@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear", "wsd"])
def test_a_corrected_number_of_updates_is_followed_from_the_next_one_on(schedule: str) -> None:
    train, optimizer = TrainConfig(lr=LR, min_lr=MIN_LR, warmup_steps=2, schedule=schedule), Groups()
    made = build_schedule(optimizer, train, 9)
    for update, total in enumerate([9, 9, 9, 12, 12, 11, 11, 40, 40, 10], 1):
        set_schedule_length(made, train, total)
        made.step(increment=1)
        want = wanted(update, total, 2, schedule)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(want, rel=1e-12), update


def test_rates_written_out() -> None:
    def of(schedule: str, **train: Any) -> list[float]:
        return [plain / LR for _, plain in rates(6, 2, schedule=schedule, **train)]

    assert of("constant", min_lr=MIN_LR) == pytest.approx([0.5, 1, 1, 1, 1, 1])
    assert of("linear") == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    assert of("wsd") == pytest.approx([0.5, 1, 1, 1, 1, 0.5])
    assert of("wsd", decay_steps=3) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert of("wsd", decay_steps=4) == pytest.approx(of("linear"))


def test_epochs_that_are_too_short_for_the_decay_are_refused() -> None:
    loader: Any = SimpleNamespace(steps_for_epochs=lambda epochs: round(10 * epochs))
    train = TrainConfig(epochs=1, warmup_steps=7, schedule="wsd", decay_steps=3)
    assert total_steps(train, loader) == 10
    with pytest.raises(ConfigError, match=r"more than all steps of the run \(9\)"):
        total_steps(with_parts(train, epochs=0.9), loader)


@pytest.mark.slow  # importing transformers' schedules takes seconds
def test_transformers_has_the_same_rates() -> None:
    """Its schedules count from 0 and end at the last update: those of one more step, an update later, are zoo's."""
    from torch import nn, optim
    from transformers import optimization

    steps, warm_up, decay = 40, 6, 9
    length = {"num_training_steps": steps + 1}
    theirs = {
        "cosine": (optimization.get_cosine_schedule_with_warmup, length),
        "constant": (optimization.get_constant_schedule_with_warmup, {}),
        "linear": (optimization.get_linear_schedule_with_warmup, length),
        "wsd": (optimization.get_wsd_schedule, {**length, "num_decay_steps": decay + 1, "decay_type": "linear"}),
    }
    for schedule, (build, lengths) in theirs.items():
        optimizer = optim.SGD([nn.Parameter()], lr=LR)
        scheduler = build(optimizer, num_warmup_steps=warm_up, **lengths)
        want = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            want.append(optimizer.param_groups[0]["lr"])
        of_wsd = {"decay_steps": decay} if schedule == "wsd" else {}
        found = [plain for _, plain in rates(steps, warm_up, schedule=schedule, **of_wsd)]
        assert found == pytest.approx(want, rel=1e-12), schedule


@pytest.mark.parametrize(
    ("schedule", "decay"), [("cosine", None), ("constant", None), ("linear", None), ("wsd", None), ("wsd", 2)]
)
def test_more_steps_on_resuming_follow_the_longer_schedule(schedule: str, decay: int | None) -> None:
    train = TrainConfig(lr=LR, warmup_steps=2, schedule=schedule, decay_steps=decay)
    first = build_schedule(Groups(), train, 4)
    first.step(increment=4)
    optimizer = Groups()
    second = build_schedule(optimizer, train, 8)
    second.load_state_dict(first.state_dict())
    for update in range(5, 9):
        second.step(increment=1)
        want = wanted(update, 8, 2, min_lr=0.0, schedule=schedule, decay=decay)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(want, rel=1e-12)
