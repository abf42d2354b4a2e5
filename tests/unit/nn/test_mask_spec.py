"""Windows and two-way runs, in each way that attention is computed, against a loop over tokens."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.attention import varlen
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.decoder.attention.varlen import AttentionMaskSpec, gathered_attention, segment_attention
from zoo.packing import PackedLayout
from zoo.packing.spans import BidirectionalSpans

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.4
LAYOUTS = {"alike": ([24, 17, 20], 8), "one long": ([40, 3, 1, 9], 8), "alone": ([30], 8)}
SPANS = {"alike": ((0, 5), (7, 8), (20, 24), (24, 31), (45, 60)), "one long": ((3, 37), (40, 43)), "alone": ()}


def loop(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, mask_spec: AttentionMaskSpec) -> Tensor:
    """Each query against the keys it sees, one by one."""
    ends = {token: stop for start, stop in mask_spec.bidirectional.spans for token in range(start, stop)}
    starts = torch.cat([torch.full((n,), i) for i, n in enumerate(layout.padded_lengths)])
    out = torch.empty_like(q)
    for token in range(layout.total):
        first = int((starts == starts[token]).nonzero()[0])
        if mask_spec.window is not None:
            first = max(first, token - mask_spec.window + 1)
        keys = slice(first, ends.get(token, token + 1))
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            weights = (k[keys, group] @ q[token, head] * SCALE).softmax(0)
            out[token, head] = weights @ v[keys, group]
    return out


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, longest_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """PyTorch's varlen attention as its documentation says: windows aligned at the end of the keys."""
    parts = []
    pairs = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for a, b, c, d in pairs:
        assert b - a <= longest and d - c <= longest_k
        keys, values = (x[c:d].repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        own = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c)
        left, right = window_size
        hidden = (key < own - left) if left >= 0 else torch.zeros(b - a, d - c, dtype=torch.bool)
        hidden = hidden | (key > own + right) if right >= 0 else hidden
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(parts)


@pytest.fixture(params=["masked", "flash"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "flash":
        monkeypatch.setattr(varlen, "has_flash", lambda x: True)
        monkeypatch.setattr(varlen, "has_flash4", lambda x: False)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
        varlen._arguments.cache_clear()
    yield request.param


def row(name: str) -> tuple[PackedLayout, tuple[Tensor, Tensor, Tensor], Tensor]:
    lengths, align = LAYOUTS[name]
    layout = PackedLayout.from_lengths(lengths, align)
    torch.manual_seed(0)
    given = tuple(torch.randn(layout.total, n, WIDTH, requires_grad=True) for n in (HEADS, GROUPS, GROUPS))
    return layout, given, ~layout.padding_mask[0]


def gradients(out: Tensor, given: tuple[Tensor, ...], real: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out[real].square().sum(), given)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_row(name: str, window: int | None, way: str) -> None:
    layout, given, real = row(name)
    wanted = loop(*given, layout, AttentionMaskSpec(window, BidirectionalSpans(SPANS[name])))
    for _ in range(2):  # the second layer finds what the first has made
        out = segment_attention(*given, layout, SCALE, AttentionMaskSpec(window, BidirectionalSpans(SPANS[name])))
        torch.testing.assert_close(out[real], wanted[real])
    for found, want in zip(gradients(out, given, real), gradients(wanted, given, real), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_parallel_rank(
    name: str, window: int | None, size: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and windows lie across the chunks of ranks."""
    layout, (q, k, v), real = row(name)
    wanted = loop(q, k, v, layout, AttentionMaskSpec(window, BidirectionalSpans(SPANS[name])))
    order = torch.cat([layout.cp_index(rank, size) for rank in range(size)])
    both = torch.cat((k, v), dim=1)[order]
    gather = "megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region"
    monkeypatch.setattr(gather, lambda x, group: both)
    for rank in range(size):
        mine = layout.cp_index(rank, size)
        group: Any = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        mask_spec = AttentionMaskSpec(window, BidirectionalSpans(SPANS[name]))
        out = gathered_attention(q[mine], k[mine], v[mine], layout, SCALE, group, mask_spec)
        torch.testing.assert_close(out[real[mine]], wanted[mine][real[mine]])


def test_offsets_are_made_once_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, in its forward pass and in the one that recompute adds."""
    made: list[str] = []
    monkeypatch.setattr(varlen, "has_flash", lambda x: True)
    monkeypatch.setattr(varlen, "varlen_attention", lambda q, *_, **__: q)
    for name in ("offsets", "ragged", "cpu_to_device", "_chunks"):
        make = getattr(varlen, name)
        monkeypatch.setattr(varlen, name, lambda *a, name=name, make=make: made.append(name) or make(*a))
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region",
        lambda x, group: torch.cat((x, x)),
    )
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    for count in (1, 2):  # of layouts
        layout, (q, k, v), _ = row("alike")
        mine = layout.cp_index(1, 2)
        for window in (None, 4, None, 4, None):
            mask_spec = AttentionMaskSpec(window, BidirectionalSpans(SPANS["alike"]))
            gathered_attention(q[mine], k[mine], v[mine], layout, SCALE, group, mask_spec)
        assert made.count("_chunks") == 2 * count
        segment_attention(q, k, v, layout, SCALE, AttentionMaskSpec(None, BidirectionalSpans(SPANS["alike"])))
        segment_attention(q, k, v, layout, SCALE, AttentionMaskSpec(None, BidirectionalSpans(SPANS["alike"])))
        assert made.count("ragged") * 2 == made.count("offsets") == 10 * count


def test_the_next_token_of_a_generation_sees_its_window() -> None:
    layout = PackedLayout.from_lengths([9, 3])
    torch.manual_seed(0)
    q, k, v = (torch.randn(layout.total + 2, n, WIDTH) for n in (HEADS, GROUPS, GROUPS))
    rows = [[*range(9), 12], [9, 10, 11, 13]]  # prompts, and the token behind each
    cache = DecodeCache(2, 12)
    cache.keep_prompts(1, k[:12], v[:12], layout)
    cache.prompts_read(layout, torch.device("cpu"))
    out = cache.attend(1, q[12:], k[12:], v[12:], SCALE, 4)
    for found, tokens in zip(out, rows, strict=True):
        alone = PackedLayout.from_lengths([len(tokens)])
        wanted = loop(q[tokens], k[tokens], v[tokens], alone, AttentionMaskSpec(4))
        torch.testing.assert_close(found, wanted[-1])


def test_masks_are_of_one_call() -> None:
    """Two calls of one layout with other runs do not share what they have made."""
    layout, given, real = row("alike")
    one, other = (SeqParams.from_layout(layout, None, BidirectionalSpans(spans)) for spans in (((0, 5),), ((7, 12),)))
    outs = [
        segment_attention(*given, layout, SCALE, AttentionMaskSpec(4, params.bidirectional))
        for params in (one, other, one)
    ]
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=0)
    assert not torch.allclose(outs[0][real], outs[1][real])
    assert SeqParams.from_layout(layout).bidirectional is not SeqParams.from_layout(layout).bidirectional
