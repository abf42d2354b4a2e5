"""Which reductions of gradients there are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.model.build import assemble, build_model
from zoo.parallel.gradient_reduction import divide_at_the_loss
from zoo.training.optimization import build_optimizer, wrap_ddp


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


@pytest.mark.parametrize("always", [False, True])
def test_either_the_loss_is_divided_or_all_gradients(always: bool) -> None:
    """That the mean is right is what gradients of two ranks are compared for, in tests/distributed."""
    zeroed = []
    buckets = [SimpleNamespace(gradient_scaling_factor=0.25) for _ in range(2)]
    buffers = [SimpleNamespace(buckets=[bucket]) for bucket in buckets]
    chunk = SimpleNamespace(
        buffers=buffers[:1],
        expert_parallel_buffers=buffers[1:],
        config=SimpleNamespace(),
        zero_grad_buffer=lambda: zeroed.append(1),
    )
    divide_at_the_loss(chunk, 4, always=always)

    def factors() -> set[float]:
        return {bucket.gradient_scaling_factor for bucket in buckets}

    own = {1.0 if always else 0.25}  # of a backward pass that a loop begins itself
    assert factors() == own
    assert chunk.config.grad_scale_func(torch.tensor(8.0)) == 2.0
    assert factors() == own, "no loss: nothing began"
    assert chunk.config.grad_scale_func(torch.tensor(8.0, requires_grad=True)) == 2.0
    assert factors() == {1.0}
    chunk.zero_grad_buffer()
    assert factors() == own and zeroed
