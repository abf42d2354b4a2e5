"""The cache of a generation: its states are those of the packed rule, whatever the segments' lengths and padding."""

import torch

from zoo.nn.decoder.attention.cache import DecodeCache, last_tokens
from zoo.nn.decoder.attention.gated_delta_net import _unit, chunked_delta_rule
from zoo.packing import PackedLayout

LENGTHS = (5, 130, 64, 200, 70)


def test_the_state_at_each_end_is_that_of_one_token_after_the_other() -> None:
    torch.manual_seed(0)
    tokens, heads, width = sum(LENGTHS), 2, 4
    query, key, value = (torch.randn(tokens, heads, width) for _ in range(3))
    decay, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    out, states = chunked_delta_rule(query, key, value, decay, beta, LENGTHS)
    start = 0
    for length, state in zip(LENGTHS, states, strict=True):
        cache = DecodeCache(1, 1)
        cache.keep_state(1, torch.zeros(1, heads, width, width))
        for token in range(start, start + length):
            at = slice(token, token + 1)
            mine = (_unit(query[at]) * width**-0.5, _unit(key[at]), value[at], decay[at], beta[at])
            made = cache.apply_delta_rule(1, *mine)
            torch.testing.assert_close(made, out[at], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cache._states[1][0], state, atol=1e-5, rtol=1e-4)
        start += length


def test_last_tokens_are_the_real_ones() -> None:
    layout = PackedLayout.from_lengths((2, 5, 4), align=4)
    assert last_tokens(layout, 3).tolist() == [[-1, 0, 1], [6, 7, 8], [13, 14, 15]]
