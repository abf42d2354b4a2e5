"""Qwen2.5-Omni's talker: a dense decoder over what the thinker embeds and gives of a row, and over codes of one codebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.inputs import Speech
from zoo.nn.vision_language import Talker

if TYPE_CHECKING:
    from zoo.config.schema import Recipe
    from zoo.models.qwen25_omni.config import Qwen25TalkerConfig


class Qwen25Talker(Talker):
    """A dense decoder, whose codes are embedded in the thinker's width."""

    def __init__(self, config: Qwen25TalkerConfig, recipe: Recipe) -> None:
        super().__init__(config, recipe, width=config.hf.embedding_size)
        self.thinker_to_talker_proj = torch.nn.Linear(config.hf.embedding_size, config.text.hidden_size)
        torch.nn.init.normal_(self.thinker_to_talker_proj.weight, std=config.text.initializer_range)
        torch.nn.init.zeros_(self.thinker_to_talker_proj.bias)
        names = ("mask", "pad", "start", "end")
        mask, pad, start, end = (int(getattr(config.hf, f"tts_codec_{name}_token_id")) for name in names)
        self.ends, self.suppressed, self.opening = (pad, end), (start,), (mask, pad, start)

    def logits(
        self, embedded: Tensor, states: Tensor, speech: Speech, rows: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """As every talker's, of one codebook."""
        hidden = self.last_states(embedded, states, speech)
        return self._logits(hidden if rows is None else hidden.index_select(0, rows), None), None

    def last_states(self, embedded: Tensor, states: Tensor, speech: Speech, cache: DecodeCache | None = None) -> Tensor:
        """As every talker's."""
        hidden = embedded.index_fill(0, speech.media_rows, 0.0).index_add(
            0, speech.state_rows, states.to(embedded.dtype)
        )
        hidden = hidden.index_add(0, speech.code_rows, self._embedded(speech.codes[None])[:, 0].to(hidden.dtype))
        return self.decoded(self.thinker_to_talker_proj(hidden), speech, cache)

    def next_input(
        self, states: Tensor, firsts: Tensor, text: Tensor, pick: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """As every talker's, without residual codes."""
        hidden = text + self._embedded(firsts[None])[:, 0].to(text.dtype)
        return firsts.new_zeros(len(firsts), 0), self.thinker_to_talker_proj(hidden)
