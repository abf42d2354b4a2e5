"""The audio tower of Qwen3-Omni: transformers' encoder made independent of the batch."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from zoo.nn.towers.audio import encode_clips


class AudioTower(Qwen3OmniMoeAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips."""

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, output_dim)."""
        out: Tensor = self.proj2(self.act(self.proj1(encode_clips(self, features, frames))))
        return out
