"""Which reductions of gradients there are."""

from typing import Any

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.engine.model.build import assemble, build_model
from zoo.engine.train.optimization import build_optimizer, wrap_ddp


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
