"""Which reductions of gradients there are, and what they sum up to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.engine.distributed.gradient_reduction import reduce_scatter
from zoo.engine.model.build import assemble, build_model
from zoo.engine.train.optimization import build_optimizer, wrap_ddp


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_of_ranks_are_summed_in_fp32_and_rounded_once(
    async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_ddp_of_one_rank_sends_it_nothing_once_there_is_an_optimizer(
    cpu_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["size=tiny", "hardware=cpu", "engine.precision=bf16", "train.main_grads_dtype=bf16"]
    recipe = validate(load_recipe("qwen3_vl_sft", keys), 1)
    assembly = assemble(recipe)
    chunks = wrap_ddp(build_model(assembly, recipe, cpu_world), recipe)
    build_optimizer(chunks, recipe, assembly, cpu_world, total_steps=1)
    sent = []
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: sent.append(1))
    for buffer in chunks[0].buffers:
        buffer.grad_data.fill_(1.5)
    chunks[0].finish_grad_sync()
    assert not sent and all((buffer.grad_data == 1.5).all() for buffer in chunks[0].buffers)
