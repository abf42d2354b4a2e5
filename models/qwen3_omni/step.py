"""Qwen3-Omni's step: the thinker's row, and the talker's where the rows are spoken."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zoo.models.qwen3_omni.speech import Speech, SpeechTokens, SpokenInputs, packed_speech, spoken_row
from zoo.models.qwen3_omni.speech_codes import COUNTS, FRAMES, SPEAKERS
from zoo.nn.inputs import ModelInputs
from zoo.packing import PackedLayout
from zoo.steps.losses import LossInputs, speech_loss
from zoo.steps.omni import OmniStep, Tokens, sample_positions
from zoo.steps.shard import Parts

if TYPE_CHECKING:
    from zoo.models.qwen3_omni.config import Qwen3OmniConfig


class Qwen3OmniStep(OmniStep):
    """Rows of text and media, and their speech."""

    config: Qwen3OmniConfig

    def shard(
        self,
        parts: Parts,
        media: Mapping[str, Tensor],
        *,
        evaluate: bool,
        logits: bool | Literal["last"],
        training: bool = True,
    ) -> tuple[ModelInputs, LossInputs]:
        """As every step's, with the talker's row in the inputs where the rows have speech and losses are wanted."""
        rest = {name: x for name, x in media.items() if name not in (FRAMES, COUNTS, SPEAKERS)}
        inputs, loss_inputs = super().shard(parts, rest, evaluate=evaluate, logits=logits, training=training)
        if FRAMES not in media or logits:
            return inputs, loss_inputs
        speech = self.talker_row(parts.input_ids, parts.layout, media)
        spoken = SpokenInputs(**vars(inputs), speech=speech.moved(self._move, self.device))
        source = torch.zeros_like(speech.owners)
        return spoken, LossInputs(speech.owners, parts.layout.num_segments, source, (), source[:0])

    def loss(
        self, output: Tensor, loss_inputs: LossInputs, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As every step's, and that of speech where it is trained."""
        if self.speech is None:
            return super().loss(output, loss_inputs, loss_scale, evaluate)
        codebooks = self.config.hf.talker_config.num_code_groups
        total, metrics = speech_loss(output, loss_inputs, self.speech, codebooks, evaluate=evaluate)
        total = total * loss_scale
        if loss_inputs.filler:
            return total * 0.0, {name: torch.zeros_like(value) for name, value in metrics.items()}
        return total, metrics

    def talker_row(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Speech:
        """The talker's packed row for the thinker's, ids (1, T), on the host; ValueError where a row is not spoken."""
        counts = media[COUNTS].tolist()
        if len(counts) != layout.num_segments:
            raise ValueError(
                f"{len(counts)} of the batch's {layout.num_segments} rows are spoken; every row is wanted with speech"
            )
        segments = [
            row[:length] for row, length in zip(ids[0].split(layout.padded_lengths), layout.lengths, strict=True)
        ]
        frames = media[FRAMES].split(counts)
        tokens = self.speech_tokens
        rows = [spoken_row(*row, tokens) for row in zip(segments, frames, media[SPEAKERS].tolist(), strict=True)]
        cursor = self._cursor(media, self._talker_tokens)
        positions = [sample_positions(row.ids, self._talker_tokens, cursor) for row in rows]
        cursor.finish()
        starts = list(accumulate(layout.padded_lengths, initial=0))[:-1]
        return packed_speech(rows, starts, frames, positions, tokens, layout.total, self.packing.align or 1)

    @cached_property
    def _talker_tokens(self) -> Tokens:
        """Special tokens and scales of the talker's positions."""
        talker = self.config.hf.talker_config
        return Tokens(
            image=talker.image_token_id,
            video=talker.video_token_id,
            audio=talker.audio_token_id,
            vision_start=talker.vision_start_token_id,
            audio_start=talker.audio_start_token_id,
            merge=talker.spatial_merge_size,
            per_second=talker.position_id_per_seconds,
        )

    @cached_property
    def speech_tokens(self) -> SpeechTokens:
        """Ids of the talker's sequences."""
        return SpeechTokens.from_config(self.config.hf)
