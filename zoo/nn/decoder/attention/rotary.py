"""Rotary angles for one or several position axes.

Multimodal RoPE (Qwen2-VL, arXiv 2409.12191) gives every token three positions: time, height, width. Each
frequency reads one of them: Qwen2 takes them in blocks, Qwen3 interleaves them so that every axis has high
and low frequencies. Both are a choice of axis per frequency, which is all this module keeps.

Angles are made once per call from the positions of the tokens at hand (already sliced for context
parallelism), so nothing here knows of segments, packing or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.nn.kernels import fused

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class RotaryShape:
    """Rotary embedding of the decoder: frequencies of a head, sections per position axis (None: plain), interleaved.

    `frequencies` are radians a position, of the pairs of channels that are rotated. `amplitude` multiplies cosines and sines: YaRN's
    attention stays sharp in long contexts by it (arXiv 2309.00071, 3.4).
    """

    frequencies: tuple[float, ...]
    sections: list[int] | None = None
    interleaved: bool = False
    amplitude: float = 1.0


def rotary_shape(
    text: PretrainedConfig,
    head: int,
    layers: str | None = None,
    *,
    partial: bool = False,
    sections: list[int] | None = None,
    interleaved: bool = False,
) -> RotaryShape:
    """Rotary embedding by a decoder's `rope_parameters`, as transformers computes it; ArithmeticError where it can't.

    Args:
        text: transformers' config of the decoder.
        head: channels of a head.
        layers: the kind of layers, where each has parameters of its own.
        partial: whether transformers rotates a part of each head where the config says so.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

    rope = dict(text.rope_parameters if layers is None else text.rope_parameters[layers])
    if layers is not None:
        rope.pop("truncate", None)  # which transformers reads of the whole alone
    if (kind := rope.get("rope_type", "default")) == "default":
        width = int(head * float(rope.get("partial_rotary_factor", 1.0))) if partial else head
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
        return RotaryShape(tuple((1.0 / float(rope["rope_theta"]) ** exponents).tolist()), sections, interleaved)
    seen: Any = RotaryEmbeddingConfigMixin()  # what these functions read of a config
    seen.rope_parameters, seen.max_position_embeddings = rope, text.max_position_embeddings
    seen.hidden_size, seen.num_attention_heads, seen.head_dim = head, 1, head
    if hasattr(
        text, "original_max_position_embeddings"
    ):  # transformers takes this one before that of `rope_parameters`
        seen.original_max_position_embeddings = text.original_max_position_embeddings
    with torch.device("cpu"):  # also of a model that is built on the meta device
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](seen)
    if not bool(frequencies.isfinite().all()):
        raise ArithmeticError("a frequency is not finite")
    return RotaryShape(tuple(frequencies.tolist()), sections, interleaved, float(amplitude))


def axis_of_frequency(sections: list[int], interleaved: bool) -> list[int]:
    """Which position axis (0 time, 1 height, 2 width) each of the D/2 frequencies reads.

    `sections` are the counts per axis, D/2 in sum. Interleaved: frequency 3k+1 reads height for k below
    sections[1], 3k+2 reads width for k below sections[2], the rest time, as
    `Qwen3OmniMoeThinkerTextRotaryEmbedding.recomposition_frequencies` of transformers does.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes


class Rotary(torch.nn.Module):
    """Cosines and sines for positions of shape (A, B, T), A axes."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        count, sections = len(shape.frequencies), shape.sections
        if sections is not None and sum(sections) != count:
            raise ValueError(f"mrope_section {sections} sums to {sum(sections)}; {count} is wanted (D/2)")
        # Plain attributes: Float16Module would turn a buffer to bf16, and angles need fp32.
        self.frequencies = torch.tensor(shape.frequencies, dtype=torch.float32)
        axes = [0] * count if sections is None else axis_of_frequency(sections, shape.interleaved)
        self.axes, self.amplitude = torch.tensor(axes), shape.amplitude

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(A, B, T) positions, int64 or float32 -> cos and sin, each (T, B, 1, D) float32."""
        device = positions.device
        if self.axes.device != device:
            self.axes = self.axes.to(device)
            self.frequencies = self.frequencies.to(device)
        read = positions.float().permute(2, 1, 0).index_select(2, self.axes)  # (T, B, D/2)
        angles = read * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        if self.amplitude == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D channels of x (T, B, H, >=D) by angles (T, B, 1, D); the rest passes unchanged."""
    width = cos.shape[-1]
    if fused(x):
        from zoo.nn.kernels.rotary import rotate

        return rotate(x.flatten(0, 1), cos.reshape(-1, width), sin.reshape(-1, width)).view(x.shape)
    rotated, rest = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    rotated = (rotated * cos + swapped * sin).to(x.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
