"""Encoders of sound that cut a clip in chunks: lengths, costs, and a pass over a flat batch of clips.

Such an encoder of transformers (Qwen3-Omni's, Qwen3-ASR's) cuts a clip's mel frames in chunks of 2 * n_window, halves each
chunk three times by strided convolutions, and attends within windows of n_window_infer frames. Here every clip gives what it
gives alone, whatever stands beside it. transformers may pad the chunks of a batch to the longest one before the convolutions,
whose biases then leak from the padding into a shorter chunk's last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.errors import UserError
from zoo.packing.cost import TowerCost
from zoo.packing.index import cpu_to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONV_LAYERS = 3  # conv2d1, conv2d2, conv2d3
CONV_STRIDE = 2  # stride of each; kernel 3, padding 1, so a length L becomes ceil(L / 2)


def tokens_of_chunk(frames: int) -> int:
    """Tokens that the convolutions make of one chunk: 13 for a full chunk of 100 frames (1 s at 10 ms).

    The 13 is written as a number in `_get_feat_extract_output_lengths` of transformers' encoders, which
    holds for n_window = 50 alone; here it follows from the convolutions.
    """
    for _ in range(CONV_LAYERS):
        frames = -(-frames // CONV_STRIDE)
    return frames


def audio_tokens(frames: int, n_window: int) -> int:
    """Tokens (placeholders) of a clip of `frames` mel frames."""
    chunk = 2 * n_window
    return frames // chunk * tokens_of_chunk(chunk) + tokens_of_chunk(frames % chunk)


def encode_clips(tower: Any, features: Tensor, frames: list[int], *, whole_chunks: bool = False) -> Tensor:
    """The hidden states of a flat batch of clips behind the encoder's last norm.

    Args:
        tower: transformers' encoder, on zoo's attention (`use_varlen_attention`).
        features: (F, mel) of all clips end to end.
        frames: mel frames of each clip.
        whole_chunks: every chunk is padded with zeros to 2 * n_window frames, which the convolutions see as they would see
            sound. Otherwise a clip of under one chunk ends at its last frame.

    Returns:
        (tokens, d_model)
    """
    chunk = 2 * tower.n_window
    lengths = [length for n in frames for length in _cut(n, chunk)]
    padded = torch.nn.utils.rnn.pad_sequence(features.split(lengths), batch_first=True)
    if whole_chunks:
        padded = F.pad(padded, (0, 0, 0, chunk - padded.shape[1]))
    # A clip's own longest chunk is what it would be padded to alone.
    reach = [chunk if whole_chunks else min(n, chunk) for n in frames for _ in _cut(n, chunk)]
    hidden = padded.transpose(1, 2).unsqueeze(1)  # (chunks, 1, mel, longest)
    for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        hidden = F.gelu(conv(hidden))
        reach = [-(-r // CONV_STRIDE) for r in reach]
        if min(reach) < hidden.shape[-1]:
            inside = torch.arange(hidden.shape[-1]) < torch.tensor(reach)[:, None]
            hidden = hidden * cpu_to_device(inside, hidden.device).to(hidden.dtype)[:, None, None]
    hidden = tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))  # (chunks, tokens, d_model)
    width = hidden.shape[1]
    hidden = hidden + tower.positional_embedding.positional_embedding[:width].to(hidden.dtype)
    kept = torch.arange(width) < torch.tensor([tokens_of_chunk(n) for n in lengths])[:, None]
    rows = cpu_to_device(kept.flatten().nonzero().squeeze(-1), hidden.device)
    hidden = hidden.flatten(0, 1).index_select(0, rows)
    windows = _windows(tower, frames)
    offsets = F.pad(torch.tensor(windows, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    offsets = cpu_to_device(offsets, hidden.device)
    for layer in tower.layers:
        hidden = _first(layer(hidden, offsets, max_seqlen=max(windows)))
    return tower.ln_post(hidden)


def check_audio(audio: PretrainedConfig, positions: str) -> None:
    """UserError for an encoder that transformers can't build, or whose clips can't be cut into its windows.

    `positions` is the key of the config that says how many embeddings of a chunk have a position.
    """
    chunk = 2 * audio.n_window
    if audio.n_window_infer < chunk:
        raise UserError(
            f"audio_config.n_window_infer is {audio.n_window_infer}; wanted a chunk or more, 2 * n_window {chunk}"
        )
    if audio.d_model % 2 or audio.d_model < 4:
        raise UserError(f"audio_config.d_model is {audio.d_model}; wanted an even number from 4 on")
    if getattr(audio, positions) < tokens_of_chunk(chunk):
        raise UserError(
            f"audio_config.{positions} is {getattr(audio, positions)}; wanted the "
            f"{tokens_of_chunk(chunk)} embeddings of a chunk or more"
        )


def audio_cost(audio: PretrainedConfig) -> TowerCost:
    """What such an encoder costs with the two linears behind it; a row is a mel frame."""
    width, channels, chunk = audio.d_model, audio.downsample_hidden_size, 2 * audio.n_window
    tokens = tokens_of_chunk(chunk)
    convolutions, mel, frames = 0.0, audio.num_mel_bins, chunk
    maps = float(mel * frames)  # numbers kept of a chunk: input of each convolution, and of what follows it
    # A first convolution's result is the largest, and stands beside its activation.
    unkept = maps + 2.0 * channels * -(-mel // CONV_STRIDE) * -(-frames // CONV_STRIDE)
    for layer in range(CONV_LAYERS):
        mel, frames = -(-mel // CONV_STRIDE), -(-frames // CONV_STRIDE)
        maps += 2.0 * channels * mel * frames
        convolutions += 2.0 * 9 * channels * (channels if layer else 1) * mel * frames
    ends = 2.0 * width * (channels * mel + width + audio.output_dim)
    layers = audio.encoder_layers * (8.0 * width**2 + 4.0 * width * audio.encoder_ffn_dim)
    rows = chunk / tokens  # behind an embedding
    return TowerCost(
        per_row=convolutions / chunk + (ends + layers) / rows,
        per_pair=4.0 * width * audio.encoder_layers / rows**2,
        rows_per_token=rows,
        window=audio.n_window_infer,
        kept=maps / chunk + (audio.encoder_layers * (4.0 * width + 2.0 * audio.encoder_ffn_dim) + 4.0 * width) / rows,
        piece=chunk,
        attended=audio.encoder_layers * width / rows,
        layers=audio.encoder_layers,
        ends=maps / chunk + 4.0 * width / rows,
        unkept=unkept / chunk,
    )


def _windows(tower: Any, frames: list[int]) -> list[int]:
    """Tokens in each attention window: n_window_infer frames' worth, a clip's last one shorter."""
    chunk = 2 * tower.n_window
    window = tokens_of_chunk(chunk) * (tower.n_window_infer // chunk)
    return [length for n in frames for length in _cut(audio_tokens(n, tower.n_window), window)]


def _cut(total: int, size: int) -> list[int]:
    """`total` in pieces of `size`, the last one shorter."""
    return [size] * (total // size) + ([total % size] if total % size else [])


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
