"""Qwen2.5-Omni as transformers says rows with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny
from support.spoken import Heard, Pair, Spoken
from support.tiny_qwen25_talker import write_tiny_qwen25_talker


class Qwen25Pair(Pair):
    """With one codebook."""

    family = "qwen25_omni"
    names = (
        "text-short", "text-long", "image-short", "multi_image-long", "video-long", "audio-long", "audio_in_video-short", "turns",
    )  # fmt: skip
    codebooks = 1

    @staticmethod
    def write(folder: Path, **config: Any) -> Path:
        """As `write_tiny_qwen25_talker`."""
        return write_tiny_qwen25_talker(folder, **config)

    @property
    def end(self) -> int:
        """The code behind the last frame."""
        return int(self.hf.config.talker_config.tts_codec_end_token_id)

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The thinker's parts stand beside its decoder in files."""
        renames = {"model.language_model.": "model.", "model.visual.": "visual.", "model.audio_tower.": "audio_tower."}
        return tiny.renamed(dict(tensors), {f"thinker.{key}": f"thinker.{name}" for key, name in renames.items()})

    def generate(self, prompt: dict[str, Any], speaker: str, heard: Heard, **options: Any) -> None:
        """As every pair's; a speech that ends at once, of which transformers makes no sound, has none."""
        talker, token2wav = self.hf.talker, self.hf.token2wav
        forward, speak, sound_of = talker.forward, talker.generate, token2wav.forward
        ends = [talker.codec_pad_token, talker.codec_eos_token]

        @wraps(forward)  # generate reads its signature
        def talk(*args: Any, **kwargs: Any) -> Any:
            given = {name: x.clone() if torch.is_tensor(x) else x for name, x in kwargs.items()}  # it writes into them
            out = forward(*args, **kwargs)
            heard.calls.append(given)
            heard.logits.append(out.logits[0, -1])
            return out

        def said(*args: Any, **kwargs: Any) -> Any:
            out = speak(*args, **kwargs)
            codes = out[0, kwargs["input_ids"].shape[1] :]
            heard.frames += [code[None] for code in codes if int(code) not in ends]
            return out

        talker.forward, talker.generate = talk, said
        token2wav.forward = lambda code, **voice: sound_of(code, **voice) if code.shape[1] else torch.zeros(0)
        # Without the prefix generate hands pixels to the talker as well, which refuses them.
        named = {f"thinker_{name}" if name.startswith("pixel") else name: x for name, x in prompt.items()}
        try:
            answer, heard.sound = self.hf.generate(**named, speaker=speaker, talker_eos_token_id=ends, **options)
        finally:
            talker.forward, talker.generate, token2wav.forward = forward, speak, sound_of
        heard.answer = answer[0]

    def teacher_forced(self, row: Spoken, *, joint: bool = False, hf: Any = None) -> tuple[Tensor, Tensor]:
        """As every pair's, with what transformers' generation read."""
        hf = hf or self.hf
        talker, call, frames = hf.talker, row.heard.calls[0], row.frames[:, 0]
        config, table = talker.config, talker.get_input_embeddings()
        opening = table(torch.tensor([config.tts_codec_pad_token_id, config.tts_codec_start_token_id]))
        prompt, reply = call["inputs_embeds"][0], row.heard.calls[1]["thinker_reply_part"][0]
        if joint:
            prompt, reply = self._read_again(row, hf)
        texts = reply[torch.arange(len(frames)).clamp(max=len(reply) - 1)]
        inputs = torch.cat((prompt[:-2], prompt[-2:] + opening, texts + table(frames)))
        positions, deltas = talker.get_rope_index(
            call["input_text_ids"], call.get("image_grid_thw"), call.get("video_grid_thw"), call["attention_mask"],
            call.get("use_audio_in_video", False), call.get("audio_feature_lengths"), call.get("video_second_per_grid"),
        )  # fmt: skip
        later = (len(prompt) + torch.arange(len(frames)) + deltas).expand(3, 1, -1)
        out = talker.model(
            inputs_embeds=talker.thinker_to_talker_proj(inputs)[None],
            position_ids=torch.cat((positions, later), dim=-1),
        )
        logits = talker.codec_head(out.last_hidden_state[0, -len(frames) - 1 :])
        return logits, logits.new_zeros(0, len(frames), logits.shape[1])

    def _read_again(self, row: Spoken, hf: Any) -> tuple[Tensor, Tensor]:
        """The prompt and the reply that the talker reads, worked out anew with gradients of the thinker."""
        ids, first = row.ids, row.heard.prompt["input_ids"].shape[1]
        states = hf.thinker(**row.arguments(ids), output_hidden_states=True).hidden_states
        thinker, talker, table = hf.config.thinker_config, hf.talker, hf.thinker.get_input_embeddings()
        media = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        read = states[-1][0] + states[0][0].masked_fill(torch.isin(ids, media)[:, None], 0.0)
        bos = row.heard.calls[0]["input_text_ids"][0, -2:-1]
        prompt = torch.cat((read[:first], table(bos), read[first : first + 1]))
        return prompt, torch.cat(
            (read[first + 1 :], table(torch.tensor([talker.text_eos_token, talker.text_pad_token])))
        )
