"""Slow steps and their causes, from the parts that ranks have measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.logging.step_timer import PARTS, Spans, StepTimes


def step_times(factor: float) -> StepTimes:
    log, run = (
        SimpleNamespace(slow_step=factor, straggler_steps=0),
        SimpleNamespace(dir="", profile=None, profile_ranks=[0]),
    )
    recipe: Any = SimpleNamespace(log=log, run=run)
    world: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, size=1, pp_size=1)
    return StepTimes(recipe, world)


def slow_step(seconds: float, *ranks: list[float]) -> dict | None:
    times = step_times(3.0)
    for _ in range(6):
        assert times.slow_step(1.0, [[0.1, 0.1, 0.2, 0.0]] * len(ranks)) is None
    return times.slow_step(seconds, list(ranks))


@pytest.mark.parametrize(
    ("ranks", "seconds", "cause", "rank"),
    [
        ([[0.1, 0.1, 0.2, 0.0], [3.1, 0.1, 0.2, 0.0]], 4.0, "data", 1),
        ([[0.1, 3.1, 0.2, 0.0], [0.1, 0.1, 3.2, 0.0]], 4.0, "tower", 0),  # the other waits in the exchange
        ([[0.1, 0.1, 3.2, 0.0], [0.1, 0.1, 3.3, 0.0]], 4.0, "network", None),
        ([[0.1, 0.1, 0.2, 5.0], [0.1, 0.1, 0.2, 5.0]], 1.0, "save", None),
        ([[0.1, 0.1, 0.2, 0.0], [0.1, 0.1, 0.2, 0.0]], 4.0, "compute", None),
    ],
)
def test_the_cause(ranks: list[list[float]], seconds: float, cause: str, rank: int | None) -> None:
    found = slow_step(seconds, *ranks)
    assert found is not None
    assert (found["cause"], found.get("rank"), found["median"]) == (cause, rank, 1.0)
    assert {f"{part}_seconds" for part in PARTS} <= set(found)


def test_what_is_not_slow() -> None:
    assert slow_step(2.9, [0.1, 0.1, 0.2, 0.0]) is None
    assert step_times(3.0).slow_step(100.0, [[0.0] * 4]) is None  # nothing to compare with
    off = step_times(0.0)
    assert [off.slow_step(seconds, [[0.0] * 4]) for seconds in (*[1.0] * 9, 100.0)] == [None] * 10


def test_spans_are_recorded_within_steps_alone() -> None:
    spans = Spans(torch.device("cpu"))
    spans.start("tower")
    spans.stop("tower")
    assert spans.take() == {}
    spans.active = True
    for _ in range(2):
        spans.start("tower")
        spans.stop("tower")
    assert list(spans.take()) == ["tower"] and spans.take() == {}
