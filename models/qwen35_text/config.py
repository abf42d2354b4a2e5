"""The architecture of Qwen3.5's language models, as transformers describes it."""

from __future__ import annotations

from zoo.nn.family import FamilyConfig


class Qwen35TextConfig(FamilyConfig):
    """A `transformers.Qwen3_5TextConfig`, or a `Qwen3_5MoeTextConfig`.

    Its `mrope_section` says which of three positions turns a frequency; those of text are one.
    """

    title = "Qwen3.5, text"
    kinds = ("qwen3_5_text", "qwen3_5_moe_text")
    traits = ("qk_norm", "output_gate", "zero_centered")
    partial_rotary = True
    # Multi-token prediction, for which transformers has no module.
    further = ("head_dim", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
