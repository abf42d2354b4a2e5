"""Deepstack belongs to a tower of any name, across pipeline stages and where ranks share their media."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.nn.decoder.attention.rotary import RotaryShape
from zoo.nn.decoder.config import transformer_config
from zoo.nn.inputs import Encoded, ModelInputs, Placement, Stage, Vocabulary
from zoo.nn.multimodal import MultimodalModel, joined

TEXT = SimpleNamespace(
    num_hidden_layers=3, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    rms_norm_eps=1e-6, initializer_range=0.2,
)  # fmt: skip
LAYERS = 2  # that features are added after


class Seeing(MultimodalModel):
    """A tower of linear maps: embeddings, and features for two decoder layers."""

    def __init__(self, tower: str, deepstack: Mapping[str, int]) -> None:
        super().__init__(
            transformer_config(TEXT, Recipe()),
            vocabulary=Vocabulary(32),
            rotary=RotaryShape((1.0, 0.1, 0.01, 0.001)),
            backend="torch",
            stage=Stage(),
            towers={tower: torch.nn.Linear(4, 16 * (1 + LAYERS))},
            deepstack_layers=deepstack,
        )
        self.name = tower

    def tower_names(self) -> tuple[str, ...]:
        return (self.name,)

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
        embeddings, *features = getattr(self, self.name)(media["patches"]).split(16, dim=-1)
        return {self.name: Encoded(embeddings, tuple(features))}


def model_of(tower: str) -> Seeing:
    torch.manual_seed(3)
    model = Seeing(tower, {tower: LAYERS})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def inputs_of(tower: str, **more: Any) -> ModelInputs:
    """Eight tokens, the third to the fifth of a medium."""
    positions = torch.arange(8)[None, None]
    placements = {tower: Placement(torch.tensor([2, 3, 4]), torch.arange(3))}
    media = {"patches": torch.linspace(-1, 1, 12).view(3, 4)}
    return ModelInputs(torch.arange(8)[None], positions, None, None, media, placements, **more)


@torch.no_grad()
def logits(tower: str, **more: Any) -> Tensor:
    return model_of(tower)(inputs_of(tower, **more))


@pytest.mark.usefixtures("cpu_world")
def test_the_name_of_a_tower_changes_nothing() -> None:
    found, wanted = logits("eyes"), logits("vision")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    without = model_of("eyes")
    without.encode = lambda media: {"eyes": Encoded(Seeing.encode(without, media)["eyes"].embeddings)}
    with torch.no_grad():
        assert (without(inputs_of("eyes")) - found).abs().max() > 1e-3  # the features count


@pytest.mark.usefixtures("cpu_world")
def test_features_reach_later_stages() -> None:
    """What a first stage without layers sends is taken apart by one that has all."""
    model, inputs = model_of("eyes"), inputs_of("eyes")
    with torch.no_grad():
        hidden, deepstack, _ = model._embed(inputs)
        model.input_tensor, model.pre_process = joined(hidden, deepstack.features), False
        assert len(model.input_tensor) == 8 + 3 * LAYERS
        torch.testing.assert_close(model(inputs), logits("eyes"), rtol=0, atol=0)


@pytest.mark.usefixtures("cpu_world")
def test_features_are_gathered_with_the_embeddings() -> None:
    torch.testing.assert_close(logits("eyes", shared={"eyes": 3}), logits("eyes"), rtol=0, atol=0)
    model = model_of("eyes")
    nothing = model._gather("eyes", None, 3, torch.zeros(8, 1, 16))  # of a rank that has no item to encode
    assert [tuple(x.shape) for x in (nothing.embeddings, *nothing.deepstack)] == [(3, 16)] * (1 + LAYERS)


@pytest.mark.usefixtures("cpu_world")
def test_two_towers_with_deepstack_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['ears', 'eyes'\]; one tower"):
        Seeing("eyes", {"eyes": 1, "ears": 2, "skin": 0})
