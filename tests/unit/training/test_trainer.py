"""A run that could not be built, and the loop of its steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from zoo.checkpoint import saver as saving
from zoo.checkpoint.saver import Saver
from zoo.checkpoint.sharded_state import RankState
from zoo.training import optimization
from zoo.training.trainer import Trainer


def test_what_was_built_before_a_failure_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure itself is raised, not that a part is missing."""
    released: list[Any] = []
    monkeypatch.setattr(optimization, "release_ddp", released.extend)
    with Trainer.__new__(Trainer):  # nothing is there
        pass
    with pytest.raises(ZeroDivisionError), Trainer.__new__(Trainer) as trainer:
        trainer.chunks = ["chunk"]
        raise ZeroDivisionError
    assert released == ["chunk"] and not hasattr(trainer, "chunks")


def test_memory_for_saves_is_taken_behind_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loop of a run; what takes steps alone, as a bench does, takes none."""
    taken: list[Any] = []
    monkeypatch.setattr(saving, "to_write", lambda trainable, *_, **__: taken.append(trainable) or RankState())
    saver = Saver.__new__(Saver)
    saver._prepared, saver._copied = False, SimpleNamespace(prepare=lambda *_: 0)  # type: ignore[assignment]
    saver._recipe = SimpleNamespace(train=SimpleNamespace(save="full"))  # type: ignore[assignment]
    saver._world = SimpleNamespace(size=1, is_main=True)  # type: ignore[assignment]
    saver._writing, saver.expected_seconds = None, None
    trainer: Any = Trainer.__new__(Trainer)
    trainer.recipe = SimpleNamespace(train=SimpleNamespace(eval_every=0, save_every=0))
    trainer.saver, trainer.trainable, trainer.world = saver, "chunks", SimpleNamespace(size=1)
    trainer.done, trainer.total_steps, trainer.flags, trainer.save_due, trainer.log = 0, 3, [], False, None
    trainer.saves = SimpleNamespace(poll=lambda *_: None)
    trainer.loader = SimpleNamespace(within_rollout=False)
    at: list[int] = []

    def step() -> bool:
        trainer.done += 1
        at.append(len(taken))
        return True

    trainer.train_step, trainer.should_stop = step, lambda *_: False
    trainer.train_loop()
    assert taken == ["chunks"] and at == [0, 1, 1]
