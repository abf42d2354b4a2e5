"""The step of thinkers with a talker: the thinker's row, and the talker's where the rows are spoken."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zoo.nn.inputs import ModelInputs, Speech, SpokenInputs
from zoo.packing import PackedLayout
from zoo.packing.spoken import ANSWERS, COUNTS, FRAMES, SPEAKERS, WEIGHTS, SpokenRow
from zoo.steps.losses import LossInputs, SpokenLabels, speech_loss
from zoo.steps.omni import OmniStep, Tokens, sample_positions
from zoo.steps.shard import IGNORE, Parts

if TYPE_CHECKING:
    from zoo.nn.family import SpeakingConfig


def packed_speech(
    rows: Sequence[SpokenRow], segments: Sequence[Tensor], starts: Sequence[int], frames: Sequence[Tensor],
    positions: Sequence[Tensor], code_eos: int, align: int = 1,
) -> Speech:  # fmt: skip
    """The packed row of S sequences, on the host.

    Args:
        segments: (L_i,) tokens of each row.
        starts: where they begin in the thinker's row.
        frames: (F_i, codebooks) of each.
        positions: (3, N_i) of each.
        code_eos: the code behind the last frame.
        align: each sequence is padded to a multiple of this.
    """
    layout = PackedLayout.from_lengths([len(row.ids) for row in rows], align)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    offsets = itertools.accumulate(layout.padded_lengths, initial=0)
    trailing, trailing_rows = list[Tensor](), list[Tensor]()
    widest = max(0 if row.trailing is None else len(row.trailing) for row in rows) + 1
    for number, (row, ids, start, offset, of_row) in enumerate(
        zip(rows, segments, starts, offsets, frames, strict=False)
    ):
        parts["text"].append(row.tokens(ids, row.text))
        if row.trailing is not None and not len(of_row):
            fill = widest - len(row.trailing)
            trailing.append(torch.nn.functional.pad(row.tokens(ids, row.trailing), (0, fill), value=row.specials[-1]))
            if row.trailing_stated:
                of_thinker = torch.where(row.trailing < 0, -1, row.trailing + start)
                trailing_rows.append(torch.nn.functional.pad(of_thinker, (0, fill), value=-1))
        stated, media, coded = (mask.nonzero()[:, 0] for mask in (row.stated, row.media, row.codes >= 0))
        label_rows = offset + len(row.ids) - len(of_row) - 1 + torch.arange(len(of_row) + 1)
        parts["state_rows"].append(stated + offset)
        parts["thinker_rows"].append(row.text[stated] + start)
        parts["media_rows"].append(media + offset)
        parts["code_rows"].append(coded + offset)
        parts["codes"].append(row.codes[coded])
        parts["input_rows"].append(label_rows[1:])
        parts["frame_rows"].append(label_rows[:-1])
        parts["label_rows"].append(label_rows)
        parts["targets"].append(torch.cat((of_row[:, 0], torch.tensor([code_eos]))))
        parts["ends"].append(torch.arange(len(of_row) + 1) == len(of_row))
        parts["segments"].append(torch.full((len(of_row) + 1,), number))
    mask, texts, codes = layout.padding_mask, parts.pop("text"), torch.cat(list(frames))
    states = sum(map(len, parts["thinker_rows"]))
    return Speech(
        layout=layout,
        positions=layout.pack_list([of_row.T for of_row in positions]).permute(2, 0, 1),
        padding_mask=mask if bool(mask.any()) else None,
        text=layout.pack_list(texts, fill=rows[0].specials[-1])[0],
        input_frames=codes,
        frames=codes,
        states=states,
        state_ids=torch.arange(states),
        held_ids=torch.arange(states),
        trailing=torch.stack(trailing) if trailing else None,
        trailing_rows=torch.stack(trailing_rows) if trailing_rows else None,
        **{name: torch.cat(values) for name, values in parts.items()},
    )


class SpeakingStep(OmniStep):
    """Rows of text and media, and their speech."""

    config: SpeakingConfig

    def shard(
        self,
        parts: Parts,
        media: Mapping[str, Tensor],
        *,
        evaluate: bool,
        logits: bool | Literal["last"],
        training: bool = True,
    ) -> tuple[ModelInputs, LossInputs]:
        """As every step's, with the talker's row in the inputs where the rows have speech and its losses are wanted."""
        rest = {name: x for name, x in media.items() if name not in (FRAMES, COUNTS, SPEAKERS, WEIGHTS, ANSWERS)}
        inputs, loss_inputs = super().shard(parts, rest, evaluate=evaluate, logits=logits, training=training)
        if FRAMES not in media or logits or not (training or evaluate):
            return inputs, loss_inputs
        speech = self.talker_row(parts.input_ids, parts.layout, media)
        if self.cp_size > 1:
            speech = speech.share(self.cp_rank, self.cp_size, self._context_shard(parts).local)
        spoken = SpokenInputs(**vars(inputs), speech=speech.moved(self._move, self.device))
        if self.speech is None or not self.speech.text:
            loss_inputs = replace(loss_inputs, label_segments=speech.segments[:0], label_source=speech.segments[:0])
        labelled = (parts.labels != IGNORE) & (parts.token_index > 0)
        labels = torch.bincount(parts.segment_ids[labelled], minlength=len(media[COUNTS])).clamp(min=1)
        share = ((media[COUNTS].cpu() + 1) / labels)[loss_inputs.label_segments]
        of_codes = (speech.ends, media[WEIGHTS].cpu()[speech.segments], share)
        return spoken, replace(loss_inputs, spoken=SpokenLabels(speech.segments, *map(self._move, of_codes)))

    def loss(
        self, output: Tensor, loss_inputs: LossInputs, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As every step's, and that of speech where it is trained."""
        if self.speech is None:
            return super().loss(output, loss_inputs, loss_scale, evaluate)
        total, metrics = speech_loss(output, loss_inputs, self.speech, evaluate=evaluate)
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
        frames, tokens = media[FRAMES].split(counts), self.config.speech_tokens
        answers = [(first, stop) for first, stop in media[ANSWERS].tolist()]
        rows = list(map(tokens.row, segments, frames, answers, media[SPEAKERS].tolist()))
        cursor = self._cursor(media, self._talker_tokens)
        positions = [sample_positions(row.ids, self._talker_tokens, cursor) for row in rows]
        cursor.finish()
        starts = list(itertools.accumulate(layout.padded_lengths, initial=0))[:-1]
        align = self.packing.align or 1
        return packed_speech(rows, segments, starts, frames, positions, tokens.code_eos, align)

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
            whole=self.whole_positions,
        )
