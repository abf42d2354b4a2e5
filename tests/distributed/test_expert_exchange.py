"""A token goes once to each rank that has some of its experts, or to all, and comes back once; recomputed experts need no other exchange."""

from __future__ import annotations

import pytest
import torch
from support.expert_exchange import EXPERTS, TOKENS, TOPK, factors, route, tokens_of
from support.pool import Pool

from zoo.nn.decoder.experts.exchange import ALL_GATHER_SMS, ALL_TO_ALL_SMS


@pytest.mark.parametrize(("size", "shares"), [(2, 1), (4, 1), (4, 2)], ids=["ep2", "ep4", "ep2 etp2"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("to_all", "most"),
    [(False, None), (True, None), (True, max(TOKENS)), (True, max(TOKENS) + 3)],
    ids=["to their experts", "to all", "to all, told the most tokens", "to all, told more"],
)
def test_tokens_of_all_ranks(
    size: int, shares: int, recompute: bool, to_all: bool, most: int | None, pool: Pool
) -> None:
    of_rank = EXPERTS * shares // size
    wanted_factors = torch.zeros(EXPERTS, factors().shape[1])
    results = pool.run(size, route, shares, recompute, to_all, most)
    for rank, found in enumerate(results):
        hidden, weights, chosen = tokens_of(rank)
        inputs = hidden.requires_grad_(), weights.requires_grad_(), factors().requires_grad_()
        each = inputs[2][chosen] * hidden[:, None] * weights[..., None]
        each.sum().backward()
        torch.testing.assert_close(found["out"], each.sum(1).detach())
        torch.testing.assert_close(found["hidden"], inputs[0].grad)
        torch.testing.assert_close(found["weights"], inputs[1].grad)
        wanted_factors += inputs[2].grad
        ranks = [
            size if to_all else len({expert // of_rank for expert in experts}) * shares for experts in chosen.tolist()
        ]
        assert found["sent"] == dict(enumerate(ranks))
        assert found["planned"] == ["exchange"] * (most is None), "ranks that are told ask nobody"
        # Rows and the choices that go with them, and sums back; then gradients of each, the weights' while those of tokens are on their way.
        assert found["forward"] == ["exchange"] * 3
        assert found["backward"] == ["exchange"] * 3 + ["weight"]
        # The recomputed product leaves SMs free for the exchange of gradients.
        assert found["free_sms"] == [0] + [ALL_GATHER_SMS if to_all else ALL_TO_ALL_SMS] * recompute
    assert sum(len(found["sent"]) for found in results) == sum(TOKENS[:size])
    # Experts compute the rows that chose them, and none for a token that is not there.
    assert sum(found["computed"] for found in results) == sum(TOKENS[:size]) * TOPK * shares
    parts = [found["factors"] for found in results]
    whole = torch.cat([sum(parts[at : at + shares]) for at in range(0, size, shares)])  # type: ignore[misc]
    torch.testing.assert_close(whole, wanted_factors)
