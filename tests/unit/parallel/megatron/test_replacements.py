"""What stands in the place of megatron-core's functions gives what they should have given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zoo.parallel.megatron.replacements import reduce_scatter


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_of_ranks_are_summed_in_fp32_and_rounded_once(async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([[256.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.bfloat16)
    waited = []
    handle = SimpleNamespace(wait=lambda: waited.append(1)) if async_op else None

    def exchange(received: torch.Tensor, sent: torch.Tensor, **_: Any) -> Any:
        received.copy_(parts.flatten())
        return handle

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    out = torch.zeros(2, dtype=torch.bfloat16)
    group = SimpleNamespace(size=lambda: 3)
    found = reduce_scatter(
        out, torch.zeros(6, dtype=torch.bfloat16), op=dist.ReduceOp.SUM, group=group, async_op=async_op
    )
    if async_op:
        assert found is not None and not out.any()
        found.wait()
    assert out.tolist() == [258.0, 6.0], "in bf16, 256 + 1 is 256"
    assert len(waited) == async_op


def test_other_gradients_are_summed_by_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda *_, **options: asked.append(options))
    whole = torch.ones(4)
    options: dict[str, Any] = {"op": dist.ReduceOp.AVG, "group": SimpleNamespace(size=lambda: 2)}
    reduce_scatter(whole[:2], whole, async_op=False, **options)
    assert asked == [{"async_op": False, **options}]
