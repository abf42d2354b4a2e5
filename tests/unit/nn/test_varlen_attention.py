"""Varlen attention calls PyTorch's function by the arguments that the installed version has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.attention.varlen import varlen_attention


def plain(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention of (T, H, D), segment by segment."""
    parts = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        scores = torch.einsum("thd,shd->hts", q[start:end], k[start:end]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v[start:end]))
    return torch.cat(parts)


def of_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, is_causal: bool = False
) -> Tensor:  # fmt: skip
    return plain(query, key, value, cu_q, query.shape[-1] ** -0.5, is_causal)


def of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert scale is not None and window_size[0] == -1
    return plain(query, key, value, cu_q, scale, window_size[1] == 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("version", [of_2_10, of_2_11])
def test_older_and_newer_arguments_mean_the_same(version: Any, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", version)
    q, k, v = torch.randn(3, 7, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    out = varlen_attention(q, k, v, offsets, 4, 0.3, causal=causal)
    torch.testing.assert_close(out, plain(q, k, v, offsets, 0.3, causal))
