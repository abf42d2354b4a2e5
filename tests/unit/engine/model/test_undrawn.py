"""Weights that are loaded are not drawn before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import recipe_for, single_process_world
from support.stacks import TINY

from zoo.engine.checkpoint import initial_weights
from zoo.engine.distributed.world import seed_everything
from zoo.engine.model import build


@pytest.mark.parametrize("name", ["qwen3_vl moe", "qwen35_vl", "qwen3_omni", "gemma3"])
def test_a_model_whose_weights_are_loaded_draws_none(name: str, tmp_path: Path) -> None:
    stack = TINY[name]
    folder = stack.write(tmp_path / "model")
    with single_process_world() as world:
        recipe = recipe_for(folder, "train.mtp_loss=0", recipe=stack.recipe)

        def built(*, draw: bool) -> tuple[dict[str, Any], bool]:
            assembly = build.assemble(recipe)
            (model,) = build.build_model(replace(assembly, source=None) if draw else assembly, recipe, world)
            drawn = torch.get_rng_state()
            seed_everything(recipe.run.seed)
            drew = not torch.equal(drawn, torch.get_rng_state())
            initial_weights.init_weights([model], assembly, recipe, world)
            return model.state_dict(), drew

        (found, drew), (wanted, drew_before) = built(draw=False), built(draw=True)
    assert not drew and drew_before
    for key, want in wanted.items():
        if torch.is_tensor(want):
            assert torch.equal(found[key], want), key
