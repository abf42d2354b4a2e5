"""Qwen2.5-Omni: towers from transformers on zoo's multimodal decoder, and the talker."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

from zoo.models.qwen25_omni.talker import Qwen25Talker
from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.vision_language import SpeakingModel
from zoo.packing.index import cpu_to_device


class AudioTower(hf.Qwen2_5OmniAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips; the host works out their places.

    It cuts a clip's mel frames in chunks of 2 * n_window, halves each by a convolution, attends within chunks, and means the
    clip's states two by two. It makes each clip what it is alone: what pads a chunk is zero for both convolutions.
    """

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, output_dim)."""
        chunk = 2 * self.n_window
        chunks = [min(chunk, n - start) for n in frames for start in range(0, n, chunk)]
        lengths = torch.tensor(chunks)
        offsets = hf.get_audio_cu_seqlens(lengths)
        worked_out = {
            "chunk_lengths": lengths,
            "cu_seqlens": offsets,
            "valid_indices": hf.get_valid_indices(lengths),
            "pool_indices": hf.get_pool_indices(torch.tensor(frames)),
        }
        padded = torch.nn.utils.rnn.pad_sequence(features.split(chunks), batch_first=True)
        seen = super().forward(
            padded_feature=padded.transpose(1, 2),
            max_seqlen=int(offsets.diff().max()),
            **{name: cpu_to_device(x, features.device) for name, x in worked_out.items()},
        )
        out: Tensor = seen.last_hidden_state
        return out


class Qwen25OmniModel(SpeakingModel):
    """Queries, keys and values have biases; windows of the vision tower are in its config."""

    talks = Qwen25Talker

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them.

        Nothing reads the audio tower's embeddings of a clip's bounds, which published files have: they are not trained.
        """
        audio = AudioTower._from_config(tower_config(config.root.audio_config))
        audio.audio_bos_eos_token.requires_grad_(False)
        return {"vision": hf.Qwen2_5OmniVisionEncoder._from_config(config.vision), "audio": audio}
