"""Which reductions of gradients there are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.engine.distributed.gradient_reduction import leave_out_single_ranks
from zoo.engine.model.build import assemble, build_model
from zoo.engine.train.optimization import wrap_ddp


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


def test_ddp_of_one_rank_sends_it_nothing(cpu_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["size=tiny", "hardware=cpu", "engine.precision=bf16", "train.main_grads_dtype=bf16"]
    recipe = validate(load_recipe("qwen3_vl_sft", keys), 1)
    (wrapped,) = wrap_ddp(build_model(assemble(recipe), recipe, cpu_world), recipe)
    sent = []
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: sent.append(1))
    for buffer in wrapped.buffers:
        buffer.grad_data.fill_(1.5)
    wrapped.finish_grad_sync()
    assert not sent and all((buffer.grad_data == 1.5).all() for buffer in wrapped.buffers)
