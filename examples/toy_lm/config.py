"""The architecture, as transformers describes it."""

from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import RotaryShape


class ToyConfig(FamilyConfig):
    """`transformers.Qwen3Config`."""

    title = "Qwen3"
    kinds = ("qwen3",)  # model_type of a config.json

    @property
    def rotary(self) -> RotaryShape:
        """Plain rotary embedding: one position a token."""
        return RotaryShape(float(self.text.rope_parameters["rope_theta"]))
