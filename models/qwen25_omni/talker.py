"""Qwen2.5-Omni's talker: a dense decoder over what the thinker embeds and gives of a row, and over codes of one codebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.nn.decoder.config import transformer_config
from zoo.nn.inputs import Speech, Stage, Vocabulary
from zoo.nn.vision_language import Talker

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.models.qwen25_omni.config import Qwen25TalkerConfig


class Qwen25Talker(Talker):
    """A dense decoder, whose codes are embedded in the thinker's width."""

    def __init__(self, config: Qwen25TalkerConfig, recipe: Recipe) -> None:
        super().__init__(
            transformer_config(config.text, recipe, qkv_bias=True),
            vocabulary=Vocabulary(config.text.vocab_size, width=config.hf.embedding_size),
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=Stage(),
            towers={},
        )
        self.thinker_to_talker_proj = torch.nn.Linear(config.hf.embedding_size, config.text.hidden_size)
        torch.nn.init.normal_(self.thinker_to_talker_proj.weight, std=config.text.initializer_range)
        torch.nn.init.zeros_(self.thinker_to_talker_proj.bias)

    def logits(
        self, embedded: Tensor, states: Tensor, speech: Speech, rows: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """As every talker's, of one codebook."""
        hidden = embedded.index_fill(0, speech.media, 0.0).index_add(0, speech.stated, states.to(embedded.dtype))
        hidden = hidden.index_add(0, speech.coded, self._embedded(speech.codes[None])[:, 0].to(hidden.dtype))
        hidden = self.decoded(self.thinker_to_talker_proj(hidden), speech)
        return self._logits(hidden if rows is None else hidden.index_select(0, rows), None), None
