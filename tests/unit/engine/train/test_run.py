"""A run that could not be built."""

from types import SimpleNamespace
from typing import Any

import pytest

from zoo.engine.train import optimization
from zoo.engine.train.run import Run


def test_what_was_built_before_a_failure_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure itself is raised, not that a part is missing."""
    released: list[Any] = []
    monkeypatch.setattr(optimization, "release_ddp", released.extend)
    run = Run.__new__(Run)
    run.release()
    run.trainable = SimpleNamespace(chunks=["chunk"])  # type: ignore[assignment]
    run.release()  # before there is a step
    assert released == ["chunk"] and not hasattr(run, "trainable")
