"""The recipe's schema: what each key means, its unit and its default.

These dataclasses are the documentation of every key a user may type: the docstring under a field is what editors, `help()`,
the API reference and ``zoo show --schema`` show, and each field states when it has an effect (`when`). They hold plain values
only; composition is in :mod:`zoo.config.compose`, checks that involve more than one key are in :mod:`zoo.config.validate`.
"""

from zoo.config.schema.data import DataConfig, DistillConfig, EmbedConfig, LoraConfig, ModelConfig, PackingConfig
from zoo.config.schema.recipe import Recipe
from zoo.config.schema.rl import RlConfig, VllmConfig
from zoo.config.schema.run import (
    EngineConfig,
    HubConfig,
    LogConfig,
    MachineConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "DataConfig", "DistillConfig", "EmbedConfig", "EngineConfig", "HubConfig", "LogConfig", "LoraConfig", "MachineConfig", "ModelConfig", "PackingConfig",
    "ParallelConfig", "Recipe", "RlConfig", "RunConfig", "TrainConfig", "VllmConfig",
]  # fmt: skip
