"""The models of tests that need a GPU can be built: a mistake in one would show on a GPU alone."""

import pytest
import torch
from support.stacks import ODD, WIDE


@pytest.mark.parametrize("name", [*ODD, *WIDE])
def test_a_model_can_be_built(name: str) -> None:
    kind, config, _ = (ODD | WIDE)[name].parts()
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in kind(config.root).parameters())
