"""A recipe that validates, a machine with so many GPUs, and what a change to the recipe is refused with."""

from typing import Any

import pytest

from zoo.config import validate as validation
from zoo.config.checks import engine
from zoo.config.schema import ModelConfig, Recipe, TrainConfig
from zoo.config.validate import validate
from zoo.errors import UserError

TEXT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_experts": 6,
    "moe_intermediate_size": 96,
}
MOE = Recipe(
    recipe="r",
    size="tiny",
    model=ModelConfig(family="qwen3_omni", arch={"thinker_config": {"text_config": TEXT}}),
    train=TrainConfig(steps=1),
)
DENSE = MOE.replace({"model.arch.thinker_config.text_config.num_experts": 0})


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (validation, engine):
        monkeypatch.setattr(module, "gpu_count", lambda: count)


def error_of(recipe: Recipe, changes: dict[str, Any], ranks: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        validate(recipe.replace(changes), ranks)
    return str(caught.value)
