"""Greedy answers on a GPU, with a cache and without, are transformers' `generate` on it, token by token, in fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.answers import ASKED, TOKENS, ask
from support.engine import single_process_world


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    with single_process_world() as world:
        yield world


@pytest.mark.parametrize("family", ASKED)
def test_greedy_answers_are_those_of_transformers(
    family: str, tmp_path_factory: pytest.TempPathFactory, here: Any, device: torch.device
) -> None:
    asked = ask(family, tmp_path_factory.mktemp("generate"), here)
    asked.hf.to(device)
    wanted = asked.wanted()
    assert all(len(tokens) == TOKENS for tokens in wanted)
    assert asked.found() == wanted
    assert asked.found(packing__align=8) == wanted
    assert asked.found(cached=False) == wanted
