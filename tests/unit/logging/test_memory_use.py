"""The most memory of a run, told once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.logging.memory_use import MemoryUse


class Log:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def event(self, name: str, step: int, **fields: Any) -> None:
        self.lines.append((name, step, fields))

    def say(self, text: str) -> None:
        self.lines.append(text)


def noted(device: str, steps: int, ranks: int = 1) -> list[Any]:
    """The lines of a run whose other ranks take a GiB less of each kind than the one before them."""
    log = Log()
    use = MemoryUse(SimpleNamespace(device=torch.device(device), size=ranks, rank=0))  # type: ignore[arg-type]
    for step in range(10, 10 + steps):
        own = use.flags()
        kinds = len(own) // ranks
        others = [0.0] * kinds + [own[i % kinds] - 2**30 * (i // kinds) for i in range(kinds, len(own))]
        use.note(log, step, [a + b for a, b in zip(own, others, strict=True)] + [7.0] * 3)  # type: ignore[arg-type]
    return log.lines


def test_it_is_told_after_the_second_step_of_a_process() -> None:
    assert noted("cpu", 1) == []
    ((name, step, found),) = noted("cpu", 5)
    assert (name, step) == ("memory", 11)
    assert 0.1 < found["host_gib"] < 100 and found["peak_gib"] is found["reserved_gib"] is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_a_gpu_it_is_said(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    (_, _, found), said = noted("cuda", 2, ranks)
    assert (found["peak_gib"], found["reserved_gib"]) == (3, 4)
    assert said.startswith("at most 3.0 GiB of a GPU in use, 4.0 with the gaps between")
