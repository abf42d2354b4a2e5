"""Checks of the optimizer against what is trained."""

from __future__ import annotations

from zoo.config.schema import Recipe
from zoo.errors import ConfigError


def check_optimizer(recipe: Recipe) -> None:
    """ConfigError for Muon with adapters, whose matrices it is not made for, or with state on the host."""
    if recipe.train.optimizer == "muon" and recipe.lora.rank:
        raise ConfigError(
            f"train.optimizer=muon with lora.rank={recipe.lora.rank}: Muon updates whole weights, not the two factors of an adapter; "
            f"set train.optimizer=adamw, or lora.rank=0 to train the weights"
        )
    fraction = recipe.train.optimizer_offload_fraction
    if recipe.train.optimizer == "muon" and fraction:
        raise ConfigError(
            f"train.optimizer=muon with train.optimizer_offload_fraction={fraction:g}: Muon orthogonalises matrices on the GPU and "
            f"needs their momentum there; set train.optimizer=adamw, or train.optimizer_offload_fraction=0"
        )
