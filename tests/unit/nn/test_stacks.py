"""The models of tests that need a GPU can be built: a mistake in one would show on a GPU alone."""

import pytest
import torch
import transformers
from support.stacks import ODD, WIDE


@pytest.mark.parametrize("name", [*ODD, *WIDE])
def test_a_model_can_be_built(name: str) -> None:
    stack = (ODD | WIDE)[name]
    with torch.device("meta"):
        model = getattr(transformers, stack.kind)(stack.config().root)
    assert sum(parameter.numel() for parameter in model.parameters())
