"""A stand-in for a GPU."""

from collections.abc import Iterator

import pytest
import torch
from support.megatron_faults import OnTheCpu


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with OnTheCpu() as mode:
        yield mode
