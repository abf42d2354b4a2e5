from typing import Any

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.engine.megatron import cpu_host
from zoo.engine.model.meta_model import build_meta_model


@pytest.mark.parametrize("recipe", ["qwen3_vl_sft", "qwen35_vl_moe_sft"])
def test_a_gpus_generator_is_not_looked_up_by_a_device_without_data(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel import random

    def set_state(state: Any, *args: Any, **how: Any) -> None:
        if torch.cuda.current_device() == torch.device("meta"):
            raise TypeError("tuple indices must be integers or slices, not torch.device")  # as with a GPU

    cpu_host.install()
    monkeypatch.setattr(random, "_set_cuda_rng_state", set_state)
    parameters = build_meta_model(load_recipe(recipe, ["hardware=cpu"]).model.arch).parameters
    assert parameters and all(tensor.is_meta for tensor in parameters.values())
