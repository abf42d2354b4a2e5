"""The architecture of Qwen3.5 to Qwen3.8, as transformers describes it."""

from __future__ import annotations

from typing import ClassVar

from zoo.nn.family import FamilyConfig


class Qwen35VLConfig(FamilyConfig):
    """A `transformers.Qwen3_5Config`, or a `Qwen3_5MoeConfig`."""

    title = "Qwen3.5-VL"
    kinds = ("qwen3_5", "qwen3_5_moe")
    not_built: ClassVar[dict[str, str]] = {
        "qwen4_exp": "it has four residual streams with learnt mixing, embeddings of n-grams, and attention to the tokens "
        "that an indexer chooses, which zoo's decoder has not"
    }
    traits = ("qk_norm", "output_gate", "zero_centered")
    mrope_section = (11, 11, 10)
    partial_rotary = True
    # Multi-token prediction, for which transformers has no module.
    further = ("head_dim", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
