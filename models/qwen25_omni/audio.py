"""The audio tower of Qwen2.5-Omni: transformers' encoder on a flat batch of clips, whose places the host works out.

The encoder cuts a clip's mel frames in chunks of 2 * n_window, halves each by a convolution, attends within chunks, and means
the clip's states two by two. It makes each clip what it is alone: what pads a chunk is zero for both convolutions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

from zoo.packing.index import cpu_to_device


class AudioTower(hf.Qwen2_5OmniAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips."""

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
