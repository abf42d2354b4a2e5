"""Qwen3-Omni as transformers says rows with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny
from support.spoken import Heard, Pair, Spoken
from support.tiny_talker import write_tiny_talker


class Qwen3Pair(Pair):
    """With a code predictor for residual codes."""

    family = "qwen3_omni"
    # transformers' talker can't place sound beside pictures: its config has no audio_config.
    names = ("text-short", "text-long", "image-short", "multi_image-long", "video-long", "audio-long", "turns")
    codebooks = 4

    @staticmethod
    def write(folder: Path, **config: Any) -> Path:
        """As `write_tiny_talker`."""
        return write_tiny_talker(folder, **config)

    @property
    def end(self) -> int:
        """The code behind the last frame."""
        return int(self.hf.config.talker_config.codec_eos_token_id)

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Experts stand one by one in files."""
        return tiny.experts_apart(tensors)

    def generate(self, prompt: dict[str, Any], speaker: str, heard: Heard, **options: Any) -> None:
        """As every pair's."""
        talker = self.hf.talker
        of_talker, of_predictor = talker.forward, talker.code_predictor.forward

        @wraps(of_talker)  # generate reads its signature
        def talk(*args: Any, **kwargs: Any) -> Any:
            out = of_talker(*args, **kwargs)
            heard.logits.append(out.logits[0, -1])
            if kwargs.get("residual_codes") is not None:
                heard.frames.append(kwargs["residual_codes"][0])
            return out

        @wraps(of_predictor)
        def predict(*args: Any, **kwargs: Any) -> Any:
            out = of_predictor(*args, **kwargs)
            heard.residual.append(out.logits[0, -1])
            return out

        talker.forward, talker.code_predictor.forward = talk, predict
        try:
            answer, sound = self.hf.generate(**prompt, speaker=speaker, return_audio=True, **options)
        finally:
            talker.forward, talker.code_predictor.forward = of_talker, of_predictor
        heard.answer, heard.sound = answer[0], sound.reshape(-1)

    def teacher_forced(self, row: Spoken, *, joint: bool = False, hf: Any = None) -> tuple[Tensor, Tensor]:
        """As every pair's; inputs are made by the functions that transformers' `generate` calls."""
        hf = hf or self.hf
        config, talker, frames = hf.config, hf.talker, row.frames
        with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            states = hf.thinker(**row.arguments(row.ids), output_hidden_states=True).hidden_states
            specials = hf.thinker.get_input_embeddings()(
                torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
            )
        embedded, hidden = states[0], states[config.talker_config.accept_hidden_layer]
        prompt = row.heard.prompt["input_ids"]
        length, ids = prompt.shape[1], row.ids[None]
        places = torch.where(prompt == config.im_start_token_id, torch.arange(length), -1).cummax(-1).values
        of_user = (prompt.gather(1, (places + 1).clamp(max=length - 1)) == config.user_token_id)[0]
        thinker = config.thinker_config
        media = torch.isin(ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]))
        user = hf._get_talker_user_parts(0, length, media, hidden, embedded)[:, of_user]
        bos, eos, pad = talker.text_projection(specials).chunk(3, dim=1)
        speaker = config.talker_config.speaker_id[row.speaker.lower()]
        opening, opening_ids, trailing = hf._get_talker_assistant_parts(
            length - 3, len(row.ids) + 1, speaker, embedded, pad, bos, eos
        )
        first = talker.get_input_embeddings()(frames[:, 0])
        tables = talker.code_predictor.get_input_embeddings()
        rest = [table(codes) for table, codes in zip(tables, frames.T[1:], strict=True)]
        texts = [trailing[:, i] if i < trailing.shape[1] else pad[:, 0] for i in range(len(frames))]
        heard = torch.stack([first, *rest]).sum(0)[None] + torch.stack(texts, dim=1)
        inputs = torch.cat((user, opening, heard), dim=1)
        talker_ids = torch.cat((prompt[:, of_user], opening_ids, opening_ids[:, :1].expand(1, len(frames))), dim=1)
        names = ("image_grid_thw", "video_grid_thw", "video_second_per_grid")
        out = talker(
            inputs_embeds=inputs, talker_input_ids=talker_ids, attention_mask=torch.ones_like(talker_ids),
            output_hidden_states=True, **{name: row.heard.prompt[name] for name in names if name in row.heard.prompt},
        )  # fmt: skip
        last = out.hidden_states[0][-1][0, -len(frames) - 1 : -1]
        sequences = torch.stack([last, first, *rest[:-1]], dim=1)
        predictor = talker.code_predictor
        hidden = predictor.model(inputs_embeds=sequences).last_hidden_state
        residual = torch.stack([head(hidden[:, 1 + i]) for i, head in enumerate(predictor.lm_head)])
        return out.logits[0, -len(frames) - 1 :], residual
