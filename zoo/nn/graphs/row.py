"""Rows of one fixed size, which rows of about the same size are copied into.

A captured layer reads its tokens' places from the same memory at each replay. A `StaticRow` owns that memory: the actual row stands
in front, the tokens behind it are a segment of their own, and so many further segments are empty. Whatever the layers make of
the tokens behind is cut off, and their gradient is zero, so they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.packing.index import chunks, cpu_to_device

SEGMENTS = 8  # the fewest of a static row
STEPS = 32  # sizes of rows between a power of two and the next
TOKENS = 64  # the fewest between two sizes
CHUNK = 64  # tokens that the delta rule works on at once; flash-linear-attention's size too


def static_tokens(tokens: int) -> int:
    """Tokens of the static row that holds so many: a 32nd more at most, or 63."""
    step = max(TOKENS, (1 << (tokens.bit_length() - 1)) // STEPS)
    return -(-tokens // step) * step


def static_segments(segments: int) -> int:
    """Segments of the static row for so many: a power of two with room for the tokens behind, and for one that is empty."""
    return max(SEGMENTS, 1 << (segments + 1).bit_length())


def pieces_behind(tokens: int, longest: int) -> int:
    """Segments of `longest` tokens at most that hold what is behind so many in their static row."""
    return -(-(static_tokens(tokens) - tokens) // longest)


class StaticRow:
    """Memory for the offsets, places and further tensors of a row with `tokens` tokens and `segments` segments."""

    def __init__(self, tokens: int, segments: int, device: torch.device) -> None:
        self.tokens, self.segments = tokens, segments
        self.offsets = torch.zeros(segments + 1, dtype=torch.int32, device=device)
        # of layers that attend within other, longer segments: until they are written, of one segment
        self.outer_offsets = torch.full_like(self.offsets, tokens)
        self.outer_offsets[0] = 0
        self.long_offsets = torch.zeros(segments + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        self.chunks = torch.zeros(tokens // CHUNK + segments, 2, dtype=torch.int64, device=device)
        self.by_token: dict[str, Tensor] = {}

    def layout(self) -> PackedLayout:
        """A layout whose tensors are this row's: each call gives new objects, as libraries keep what they made of a tensor with it."""
        lengths = (self.tokens, *(0,) * (self.segments - 1))
        static_layout = PackedLayout(lengths, lengths, device=self.positions.device)
        tensors = {"cu_seqlens": self.offsets, "cu_seqlens_padded": self.offsets, "positions": self.positions}
        index = {"cu_seqlens": self.long_offsets.view(-1), "chunk_indices": self.chunks.view(-1, 2)}
        return static_layout.with_values({name: x.view(x.shape) for name, x in tensors.items()}, {"delta rule": index})

    def fill(self, layout: PackedLayout, by_token: Mapping[str, Tensor]) -> None:
        """Write a row, and further tensors (T, ...) of its tokens."""
        self.fill_offsets(layout.cu_seqlens_padded)
        self.long_offsets.copy_(self.offsets)
        count = layout.total
        self.positions[:, :count].copy_(layout.positions)
        self.positions[:, count:].zero_()
        self.chunks.copy_(self._chunks(layout))
        self.fill_tokens(by_token)

    def fill_offsets(self, cu_seqlens: Tensor, longest: int | None = None) -> None:
        """Write the offsets (S + 1,) of a row's segments, of which none is longer than `longest`."""
        count = len(cu_seqlens)
        self.offsets[:count].copy_(cu_seqlens)
        self.offsets[count:].fill_(self.tokens)
        if longest is not None:  # what is behind is cut as well
            ends = torch.arange(1, len(self.offsets) - count, device=self.offsets.device) * longest
            self.offsets[count:-1].copy_((ends + cu_seqlens[-1]).clamp(max=self.tokens))

    def fill_outer_offsets(self, cu_seqlens: Tensor) -> None:
        """Write the offsets (S + 1,) of the longer segments, which are as many as the others at most."""
        count = len(cu_seqlens)
        self.outer_offsets[:count].copy_(cu_seqlens)
        self.outer_offsets[count:].fill_(self.tokens)

    def fill_tokens(self, by_token: Mapping[str, Tensor]) -> None:
        """Write further tensors (T, ...) of a row's tokens; zeros behind them."""
        for name, x in by_token.items():
            if name not in self.by_token:
                self.by_token[name] = x.new_zeros(self.tokens, *x.shape[1:])
            self.by_token[name][: len(x)].copy_(x)

    def _chunks(self, layout: PackedLayout) -> Tensor:
        """(tokens / 64 + segments, 2) of segment and chunk within it; those that are too many are of the last segment, which is empty."""
        behind = self.tokens - layout.total
        filled = chunks((*layout.padded_lengths, behind), CHUNK)
        empty = torch.tensor([[self.segments - 1, 0]]).expand(len(self.chunks) - len(filled), 2)
        return cpu_to_device(torch.cat((filled, empty)), self.chunks.device)
