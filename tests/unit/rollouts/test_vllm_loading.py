"""What vLLM's models are given, by the names that they tell."""

import pytest
import torch

from zoo.errors import UserError
from zoo.rollouts.vllm.loading import _load


class Experts(torch.nn.Module):
    """Experts as vLLM holds them: in a module of its own, whose name not every version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.routed_experts = torch.nn.ParameterDict({"w13_weight": torch.zeros(1), "w2_weight": torch.zeros(1)})


@pytest.mark.parametrize("module", ["", "routed_experts."])
def test_experts_are_known_by_either_name(module: str) -> None:
    model = torch.nn.ModuleDict({"experts": Experts(), "norm": torch.nn.LayerNorm(2, bias=False)})
    told = {f"experts.{module}w13_weight", f"experts.{module}w2_weight", "norm.weight"}
    assert _load(model, lambda weights: told, iter(())) == told
    for name in told:
        with pytest.raises(UserError, match="has 1 weights that zoo does not send"):
            _load(model, lambda weights, name=name: told - {name}, iter(()))
