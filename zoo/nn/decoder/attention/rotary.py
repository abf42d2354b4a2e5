"""Rotary angles for one or several position axes.

Multimodal RoPE (Qwen2-VL, arXiv 2409.12191) gives every token three positions: time, height, width. Each
frequency reads one of them: Qwen2 takes them in blocks, Qwen3 interleaves them so that every axis has high
and low frequencies. Both are a choice of axis per frequency, which is all this module keeps.

Angles are made once per call from the positions of the tokens at hand (already sliced for context
parallelism), so nothing here knows of segments, packing or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.nn.kernels import fused


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

    def __init__(
        self,
        dim: int,
        base: float,
        sections: list[int] | None,
        interleaved: bool,
        factor: float = 1.0,
        turning: int | None = None,
    ) -> None:
        """`dim`: rotated width D of a head; `base`: theta; `sections`: None for plain one-axis RoPE; `factor`: of positions.

        Positions are divided by `factor` (linear scaling, Chen et al. 2023, arXiv 2306.15595). `turning`: frequencies that are
        not zero, the first ones; None: all.
        """
        super().__init__()
        if sections is not None and sum(sections) != dim // 2:
            raise ValueError(f"mrope_section {sections} sums to {sum(sections)}; {dim // 2} is wanted (D/2)")
        # Plain attributes: Float16Module would turn a buffer to bf16, and angles need fp32.
        self.inverse_frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim) / factor
        if turning is not None:
            self.inverse_frequency[turning:] = 0.0
        axes = [0] * (dim // 2) if sections is None else axis_of_frequency(sections, interleaved)
        self.axes = torch.tensor(axes)

    @classmethod
    def from_shape(cls, head: int, shape: Any) -> Rotary:
        """The rotary embedding of heads of that width, by a zoo.nn.inputs.RotaryShape."""
        if shape.whole:
            turning = int(shape.fraction * head // 2)
            return cls(head, shape.base, shape.sections, shape.interleaved, shape.factor, turning)
        width = int(head * shape.fraction)
        return cls(width, shape.base, shape.sections, shape.interleaved, shape.factor)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(A, B, T) positions, int64 or float32 -> cos and sin, each (T, B, 1, D) float32."""
        device = positions.device
        if self.axes.device != device:
            self.axes = self.axes.to(device)
            self.inverse_frequency = self.inverse_frequency.to(device)
        read = positions.float().permute(2, 1, 0).index_select(2, self.axes)  # (T, B, D/2)
        angles = read * self.inverse_frequency.float()
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return angles.cos(), angles.sin()


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
