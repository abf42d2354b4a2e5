"""The audio tower of Qwen3-Omni: lengths, and transformers' encoder made independent of the batch.

The encoder cuts a clip's mel frames in chunks of 2 * n_window, halves each chunk three times by strided
convolutions, and attends within windows of n_window_infer frames. transformers pads all chunks of a batch to
the longest one before the convolutions, whose biases then leak from the padding into a shorter chunk's last
token: what a clip of under one chunk gives depends on its neighbours. `AudioTower` makes every clip give what
it gives alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

CONV_LAYERS = 3  # conv2d1, conv2d2, conv2d3 of Qwen3OmniMoeAudioEncoder
CONV_STRIDE = 2  # stride of each; kernel 3, padding 1, so a length L becomes ceil(L / 2)


def tokens_of_chunk(frames: int) -> int:
    """Tokens that the convolutions make of one chunk: 13 for a full chunk of 100 frames (1 s at 10 ms).

    The 13 is written as a number in `_get_feat_extract_output_lengths` of transformers' Qwen3-Omni, which
    holds for n_window = 50 alone; here it follows from the convolutions.
    """
    for _ in range(CONV_LAYERS):
        frames = -(-frames // CONV_STRIDE)
    return frames


def audio_tokens(frames: int, n_window: int) -> int:
    """Tokens (placeholders) of a clip of `frames` mel frames."""
    chunk = 2 * n_window
    return frames // chunk * tokens_of_chunk(chunk) + tokens_of_chunk(frames % chunk)


class AudioTower(Qwen3OmniMoeAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips."""

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, output_dim)."""
        chunk = 2 * self.n_window
        lengths = [length for n in frames for length in _cut(n, chunk)]
        # A clip's own longest chunk is what it would be padded to alone.
        reach = [min(n, chunk) for n in frames for _ in _cut(n, chunk)]
        padded = torch.nn.utils.rnn.pad_sequence(features.split(lengths), batch_first=True)
        hidden = padded.transpose(1, 2).unsqueeze(1)  # (chunks, 1, mel, longest)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            hidden = F.gelu(conv(hidden))
            reach = [-(-r // CONV_STRIDE) for r in reach]
            if min(reach) < hidden.shape[-1]:
                inside = torch.arange(hidden.shape[-1]) < torch.tensor(reach)[:, None]
                hidden = hidden * inside.to(hidden.device, hidden.dtype, non_blocking=True)[:, None, None]
        hidden = self.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))  # (chunks, tokens, d_model)
        width = hidden.shape[1]
        hidden = hidden + self.positional_embedding.positional_embedding[:width].to(hidden.dtype)
        kept = torch.arange(width) < torch.tensor([tokens_of_chunk(n) for n in lengths])[:, None]
        rows = kept.flatten().nonzero().squeeze(-1).to(hidden.device, non_blocking=True)
        hidden = hidden.flatten(0, 1).index_select(0, rows)
        windows = self._windows(frames)
        offsets = F.pad(torch.tensor(windows, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        offsets = offsets.to(hidden.device, non_blocking=True)
        for layer in self.layers:
            hidden = _first(layer(hidden, offsets, max_seqlen=max(windows)))
        hidden = self.proj1(self.ln_post(hidden))
        return self.proj2(self.act(hidden))

    def _windows(self, frames: list[int]) -> list[int]:
        """Tokens in each attention window: n_window_infer frames' worth, a clip's last one shorter."""
        chunk = 2 * self.n_window
        window = tokens_of_chunk(chunk) * (self.n_window_infer // chunk)
        return [length for n in frames for length in _cut(audio_tokens(n, self.n_window), window)]


def _cut(total: int, size: int) -> list[int]:
    """`total` in pieces of `size`, the last one shorter."""
    return [size] * (total // size) + ([total % size] if total % size else [])


def _first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
