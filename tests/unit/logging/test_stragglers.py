"""Ranks that their peers wait for, from the parts of steps that ranks have measured."""

from types import SimpleNamespace
from typing import Any

import pytest

from zoo.logging import step_timer
from zoo.logging.step_timer import Stragglers

FAST, WAITED = [0.1, 0.1, 0.4, 0.0], [0.1, 0.1, 0.1, 0.0]  # data, tower, network, save: who is waited for waits least


class Log:
    """What a run log was given."""

    main = True

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []

    def event(self, name: str, step: int, **fields: Any) -> None:
        self.events.append({"event": name, "step": step, **fields})

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    def hosts(gathered: list[str], own: str) -> None:
        gathered[:] = [f"node{rank}" for rank in range(len(gathered))]

    def make(ranks: int, steps: int, pp_size: int = 1) -> tuple[Stragglers, Any]:
        monkeypatch.setattr(step_timer.dist, "all_gather_object", hosts)
        world: Any = SimpleNamespace(size=ranks, pp_size=pp_size)
        return Stragglers(world, steps), Log()

    return make


def run(found: Stragglers, log: Any, steps: int, *ranks: list[float], seconds: float = 1.0) -> None:
    for step in range(1, steps + 1):
        found.note(log, step, seconds, ranks)


@pytest.mark.parametrize(
    ("slow", "part"), [(WAITED, "compute"), ([0.4, 0.1, 0.1, 0.0], "data"), ([0.1, 0.35, 0.1, 0.0], "tower")]
)
@pytest.mark.parametrize("others", [1, 3])
def test_a_straggler_is_named_once(slow: list[float], part: str, others: int, made: Any) -> None:
    found, log = made(1 + others, 20)
    run(found, log, 60, *[FAST] * others, slow)
    assert log.events == [
        {"event": "straggler", "step": 20, "rank": others, "host": f"node{others}", "part": part, "seconds": 0.3}
    ]
    (said,) = log.said
    assert f"rank {others} on node{others} in 20 steps in a row" in said and f"its {part} is slow" in said


def test_who_is_slow_now_and_then_is_not_named(made: Any) -> None:
    found, log = made(2, 20)
    for _ in range(5):
        run(found, log, 19, FAST, WAITED)
        run(found, log, 1, WAITED, FAST)
    run(found, log, 60, FAST, WAITED, seconds=3.1)  # 0.3 s are less than a tenth
    assert log.events == []


def test_all_ranks_of_a_slow_group_are_named(made: Any) -> None:
    found, log = made(6, 5)
    run(found, log, 9, FAST, FAST, FAST, FAST, WAITED, WAITED)
    assert [event["rank"] for event in log.events] == [4, 5]


def test_stages_of_a_pipeline_are_compared_within_themselves(made: Any) -> None:
    found, log = made(4, 5, pp_size=2)
    run(found, log, 9, WAITED, WAITED, FAST, FAST)  # the first stage ends last
    assert log.events == []
    run(found, log, 9, WAITED, WAITED, FAST, WAITED)
    assert [event["rank"] for event in log.events] == [3]


def test_off_or_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer.dist, "all_gather_object", lambda *_: pytest.fail("exchanged"))
    for ranks, steps in ((2, 0), (1, 20)):
        world: Any = SimpleNamespace(size=ranks, pp_size=1)
        found, log = Stragglers(world, steps), Log()
        run(found, log, 30, *[FAST, WAITED][:ranks])
        assert log.events == []
