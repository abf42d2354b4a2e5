"""The architecture of Qwen3.5 to Qwen3.8, as transformers describes it."""

from __future__ import annotations

from typing import ClassVar

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig


class Qwen35VLConfig(FamilyConfig):
    """A `transformers.Qwen3_5Config`, or a `Qwen3_5MoeConfig`."""

    title = "Qwen3.5-VL"
    kinds = ("qwen3_5", "qwen3_5_moe")
    not_built: ClassVar[dict[str, str]] = {
        "qwen4_exp": "it has four residual streams with learnt mixing, embeddings of n-grams, and attention to the tokens "
        "that an indexer chooses, which zoo's decoder has not",
        **dict.fromkeys(
            ("qwen3_5_text", "qwen3_5_moe_text"),
            "it is the decoder without its vision tower, which is read with its tower alone; take the whole model, and "
            "model.freeze=[vision]",
        ),
    }
    traits = ("qk_norm", "output_gate", "zero_centered")
    mrope_section = (11, 11, 10)
    partial_rotary = True
    # Multi-token prediction, for which transformers has no module.
    further = ("head_dim", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")

    def check(self) -> None:
        """UserError where the MTP layers want an embedding of their own, or linear attention another gate than SiLU."""
        # Qwen3.8 states the gate; transformers' Qwen3_5 models read `hidden_act` in its place.
        gate = getattr(self.root.text_config, "output_gate_type", None)
        if gate not in (None, "swish", "silu"):
            raise UserError(f"text_config.output_gate_type is {gate!r}; linear attention here gates with SiLU (swish)")
        if getattr(self.text, "mtp_use_dedicated_embeddings", False):
            raise UserError(
                "text_config.mtp_use_dedicated_embeddings is true; MTP layers here share the decoder's embedding"
            )
