"""Which reductions of gradients there are."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import param_and_grad_buffer

from zoo.engine.distributed.gradient_reduction import leave_out_single_ranks


def test_a_gradient_that_one_rank_alone_has_is_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def reduce(output: Any, input: Any, *, op: Any, group: Any, async_op: bool) -> str:
        sizes.append(group.size())
        return "handle"

    monkeypatch.setattr(param_and_grad_buffer, "dist_reduce_scatter_func", reduce)
    leave_out_single_ranks()
    found = [
        param_and_grad_buffer.dist_reduce_scatter_func(
            None, None, op=None, group=SimpleNamespace(size=lambda size=size: size), async_op=async_op
        )
        for size, async_op in ((1, True), (1, False), (2, True))
    ]
    found[0].wait()
    assert found[1:] == [None, "handle"] and sizes == [2]
