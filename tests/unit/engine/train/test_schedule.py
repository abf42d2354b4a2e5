"""Every update's learning rate is the one that docs/recipes.md writes down, and none of them is 0."""

import math
from typing import Any

import pytest

from zoo.config.schema import TrainConfig
from zoo.engine.train.optimization import build_schedule

LR, MIN_LR, SCALE = 2e-3, 1e-4, 0.1


class Groups:
    """An optimizer as the schedule sees it: one group as the recipe says, one of a part with lr_scale."""

    def __init__(self) -> None:
        scaled = {"max_lr": LR * SCALE, "min_lr": MIN_LR * SCALE, "wd_mult": 0.0}
        self.param_groups: list[dict[str, Any]] = [scaled, {}]


def wanted(update: int, steps: int, warm_up: int, lr: float = LR, min_lr: float = MIN_LR) -> float:
    """Of update k, from 1."""
    if update <= warm_up:
        return lr * update / warm_up
    share = (update - warm_up) / (steps + 1 - warm_up)
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * share)) / 2


def rates(steps: int, warm_up: int, **train: Any) -> list[tuple[float, ...]]:
    optimizer = Groups()
    schedule = build_schedule(optimizer, TrainConfig(lr=LR, warmup_steps=warm_up, **train), steps)
    found = []
    for _ in range(steps):
        schedule.step(increment=1)
        found.append(tuple(group["lr"] for group in optimizer.param_groups))
    return found


@pytest.mark.parametrize(
    ("steps", "warm_up"),
    [(1, 0), (1, 1), (1, 5), (2, 1), (5, 5), (5, 4), (5, 6), (7, 0), (100, 10), (20, 40)],
)
def test_every_update_s_rate(steps: int, warm_up: int) -> None:
    for update, (scaled, plain) in enumerate(rates(steps, warm_up, min_lr=MIN_LR), 1):
        want = wanted(update, steps, warm_up)
        assert plain == pytest.approx(want, rel=1e-12), update
        assert scaled == pytest.approx(SCALE * want, rel=1e-12), update
        if update == warm_up:
            assert plain == LR
    assert all(rate > 0 for both in rates(steps, warm_up) for rate in both)


def test_more_steps_on_resuming_follow_the_longer_schedule() -> None:
    first = build_schedule(Groups(), TrainConfig(lr=LR, warmup_steps=2), 4)
    first.step(increment=4)
    optimizer = Groups()
    second = build_schedule(optimizer, TrainConfig(lr=LR, warmup_steps=2), 8)
    second.load_state_dict(first.state_dict())
    for update in range(5, 9):
        second.step(increment=1)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(wanted(update, 8, 2, min_lr=0.0), rel=1e-12)
