"""Qwen3-VL's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig


class Qwen3VLConfig(FamilyConfig):
    """A `transformers.Qwen3VLConfig`, or a `Qwen3VLMoeConfig`."""

    title = "Qwen3-VL"
    kinds = ("qwen3_vl", "qwen3_vl_moe")
    traits = ("qk_norm",)
    mrope_section = (24, 20, 20)

    def check(self) -> None:
        """Whether transformers would read the experts as they are meant."""
        if not getattr(self.text, "num_experts", 0):
            return
        hidden, width = self.text.hidden_size, self.text.moe_intermediate_size
        if hidden in (width, 2 * width):
            raise UserError(
                f"text_config.moe_intermediate_size is {width} and hidden_size {hidden}: published experts stand the "
                "other way round than in memory, and transformers, which goes by their shape, would not turn square "
                "ones; change either size"
            )
