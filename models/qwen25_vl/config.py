"""Qwen2.5-VL's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig
from zoo.nn.towers.windows import check_windows, window_cost
from zoo.packing.cost import TowerCost


class Qwen25VLConfig(FamilyConfig):
    """A `transformers.Qwen2_5_VLConfig`."""

    title = "Qwen2.5-VL"
    kinds = ("qwen2_5_vl",)
    traits = ("qkv_bias",)
    further = ()  # its heads are as wide as the hidden size says, whatever head_dim a file has
    mrope_section = (16, 24, 24)
    mrope_interleaved = False

    def check(self) -> None:
        """UserError for heads that do not divide the hidden size, and for windows smaller than an embedding's patches."""
        text = self.text
        if text.hidden_size % text.num_attention_heads:
            raise UserError(
                f"text_config.num_attention_heads is {text.num_attention_heads}; wanted a divisor of hidden_size "
                f"{text.hidden_size}"
            )
        check_windows(self.vision)

    def tower_costs(self) -> dict[str, TowerCost]:
        """Cost of the vision tower, a row being a patch."""
        return {"vision": window_cost(self.vision)}
