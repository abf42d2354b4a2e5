"""Greedy answers of zoo's models, several prompts at once and with a cache, are transformers' `generate`, token by token."""

from typing import Any

import pytest
from support.answers import ASKED, TOKENS, Asked, ask


@pytest.fixture(scope="module", params=ASKED)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Asked:
    return ask(request.param, tmp_path_factory.mktemp("generate"), cpu_world)


@pytest.mark.sampled(20)
def test_greedy_answers_are_those_of_transformers(asked: Asked) -> None:
    assert len(set(asked.lengths)) > 3, "of different lengths"
    wanted = asked.wanted()
    assert all(len(tokens) == TOKENS for tokens in wanted)
    assert asked.found() == wanted
    assert asked.found(packing__align=8) == wanted, "prompts with padding behind them"
    assert asked.found(cached=False) == wanted
    first = [tokens[TOKENS // 2] for tokens in wanted[:3]]
    ends = frozenset(first)
    assert asked.found(ends) == (stopped := asked.wanted(ends))
    assert asked.found(ends, cached=False) == stopped
    assert {len(tokens) for tokens in stopped} > {TOKENS} or min(map(len, stopped)) < TOKENS
