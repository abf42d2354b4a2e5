"""One attention call for a tower's whole flat batch, as an attention function of transformers.

transformers' vision and audio encoders run all images or clips as one row with `cu_seqlens`, but split it in
Python for every implementation whose name lacks "flash". `use_varlen_attention` gives them this one: PyTorch's
varlen flash attention on a GPU in half precision, else one masked call over the segments side by side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from zoo.nn.attention import has_flash, sdpa
from zoo.packing import PackedLayout

NAME = "zoo_varlen_flash"  # "flash" makes the encoders pass cu_seqlens (is_flash_attention_requested)


def use_varlen_attention(tower: torch.nn.Module) -> torch.nn.Module:
    """Make every attention of `tower`, a transformers encoder, use `tower_attention`."""
    AttentionInterface.register(NAME, tower_attention)
    for module in tower.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
    return tower


def tower_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int | Tensor | None = None,
    is_causal: bool = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention within each segment: query, key, value (1, H, N, D) -> (1, N, H, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H, D)
    if has_flash(q):
        from torch.nn.attention.varlen import varlen_attn

        offsets = cu_seq_lens_q.to(torch.int32)
        longest = int(max_length_q) if max_length_q is not None else int(offsets.diff().max())
        window = (-1, 0) if is_causal else (-1, -1)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=window)
        assert isinstance(out, Tensor)
        return out[None], None
    layout, mask = _segments(tuple(cu_seq_lens_q.diff().tolist()), q.device)
    q, k, v = (layout.unpack(x[None]).transpose(1, 2) for x in (q, k, v))  # (S, H, L, D)
    out = sdpa(q, k, v, scaling, causal=is_causal, mask=None if is_causal else mask)
    return layout.pack(out.transpose(1, 2)), None


@lru_cache(maxsize=16)
def _segments(lengths: tuple[int, ...], device: torch.device) -> tuple[PackedLayout, Tensor | None]:
    """Layout of the segments, and which keys are real (S, 1, 1, L); None where all segments are as long."""
    layout = PackedLayout.from_lengths(lengths)
    if len(set(lengths)) == 1:
        return layout.to(device), None
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return layout.to(device), real[:, None, None].to(device)
