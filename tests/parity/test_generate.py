"""Greedy answers of zoo's models, several prompts at once and with a cache, are transformers' `generate`, token by token."""

from itertools import takewhile
from typing import Any

import pytest
import torch
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


@pytest.mark.sampled(5)
def test_log_probabilities_of_drawn_answers_are_those_of_transformers(asked: Asked) -> None:
    """At the temperature and before top_p; of several answers to a prompt that is read once, and of prompts read anew each time."""
    answers, anew = (asked.drawn(0.7, 3, **options) for options in ({}, {"cached": False}))
    assert answers.tokens == anew.tokens
    assert len({tuple(tokens) for tokens in answers.tokens[:3]}) > 1, "answers to a prompt are drawn apart"
    for at in range(0, len(answers.tokens), 2):
        media = asked.zoo.assembly.processor.media_ids  # transformers takes one that is drawn for a further medium
        tokens = [*takewhile(lambda token, media=media: token not in media, answers.tokens[at])]
        if not tokens:
            continue
        wanted = asked.wanted_logprobs(at // 3, tokens, 0.7)
        for found in (answers, anew):
            torch.testing.assert_close(torch.tensor(found.logprobs[at][: len(tokens)]), wanted, rtol=0, atol=1e-5)
