"""Attention within the segments of a packed row: causal, and where a layer or a family has them, windows and bidirectional spans.

A token sees its segment up to itself or, in one of `zoo.packing.spans.BidirectionalSpans`, up to the span's end. Under a window of W
tokens it sees none further back than the W - 1 before it. On a GPU in half precision this is one varlen call, and a second
one for the tokens of spans alone, each against the keys up to its span's end. Elsewhere it is masked scaled dot product
attention, segments side by side where that pays.

Context parallelism gathers keys and values; a rank holds a front and a back chunk of every segment.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.decoder.attention.context_moves import in_row_order
from zoo.nn.kernels.widths import flash4_width, flash_takes
from zoo.packing import PackedLayout
from zoo.packing.index import cpu_to_device, offsets, ragged, starts
from zoo.packing.spans import BidirectionalSpans


@dataclass(frozen=True)
class AttentionMaskSpec:
    """What tokens see of their segment.

    Attributes:
        window: the most keys that a token sees up to itself, itself included; None: all.
        bidirectional: spans of tokens that see one another both ways.
    """

    window: int | None = None
    bidirectional: BidirectionalSpans = field(default_factory=BidirectionalSpans)

    def within(self, longest: int) -> AttentionMaskSpec:
        """The same for segments of at most `longest` tokens, where a window as wide is none."""
        return AttentionMaskSpec(None, self.bidirectional) if self.window and self.window >= longest else self

    @property
    def plain(self) -> bool:
        """Whether the mask is causal: no window, and no bidirectional spans."""
        return self.window is None and not self.bidirectional.spans

    @property
    def name(self) -> tuple[object, ...]:
        """What names this mask in the cache of a layout."""
        return self.window, self.bidirectional.spans

    def first_key(self, start: int, token: int) -> int:
        """The first key that a token sees of its segment, which begins at `start`."""
        return start if self.window is None else max(start, token - self.window + 1)


CAUSAL = AttentionMaskSpec()


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Scaled dot product attention on (B, H, T, D) with key and value (B, G, T', D), H a multiple of G."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)


def has_flash(x: Tensor) -> bool:
    """Whether PyTorch's varlen flash attention takes x (..., D): GPU, half precision, D a multiple of 8 up to 256."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and flash_takes(x.shape[-1])


def has_flash4(x: Tensor) -> bool:
    """Whether FlashAttention 4 is installed and right for x (..., D): on Hopper, at the widths it was checked at."""
    return flash4_width(x.shape[-1]) is not None and _flash4_there(x.device)


@lru_cache(maxsize=8)
def _flash4_there(device: torch.device) -> bool:
    installed = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return bool(installed) and torch.cuda.get_device_capability(device)[0] == 9


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
    key_segments: tuple[Tensor, int] | None = None,
    pad: bool = True,
) -> Tensor:
    """Flash attention of q (T, H, D) against k and v (T', G, D), a GPU in half precision, within segments.

    Segments of q begin at `offsets` (S + 1,), the longest has `longest` tokens; `key_segments` are the same two of k and
    v, where these are cut otherwise. Causal attention and `window`, the most keys up to a query's own, are aligned at a segment's
    end. FlashAttention 4 where it is installed (twice as fast on Hopper) and there is no window, else PyTorch's. Without `pad`
    it gets heads as wide as they are, with gradients that may be wrong.
    """
    offsets = offsets.to(torch.int32)
    key_offsets, longest_key = key_segments or (offsets, longest)
    if has_flash4(q) and window is None:
        from flash_attn.cute.interface import flash_attn_varlen_func

        head = q.shape[-1]
        if pad and (wider := flash4_width(head)) is not None and wider > head:
            q, k, v = (F.pad(x, (0, wider - head)) for x in (q, k, v))
        out = flash_attn_varlen_func(
            *(q, k, v),
            cu_seqlens_q=offsets,
            cu_seqlens_k=key_offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest_key,
            softmax_scale=scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return (out[0] if isinstance(out, tuple) else out)[..., :head]
    from torch.nn.attention.varlen import varlen_attn

    cuts = offsets, key_offsets, longest, longest_key
    options: dict[str, Any] = {"scale": scale, "window_size": ((window or 0) - 1, 0 if causal else -1)}
    if "window_size" not in _arguments(varlen_attn):  # PyTorch 2.10, which scales by the width
        assert window is None, "`_has_flash_with` says that it takes none"
        q, options = q * (scale * math.sqrt(q.shape[-1])), {"is_causal": causal}
    out = varlen_attn(q, k, v, *cuts, **options)
    assert isinstance(out, Tensor)
    return out


@lru_cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, mask_spec: AttentionMaskSpec = CAUSAL
) -> Tensor:
    """Attention of (T, H, D) against (T, G, D) within the segments of `layout`.

    Padding stands at segment ends, so the padded offsets give right results for every real token
    (a causal token looks only back, a span ends with its segment); what a padding token gets is finite and unused.
    """
    mask_spec = mask_spec.within(layout.max_seqlen)
    if _has_flash_with(q, mask_spec):
        cuts = layout.cu_seqlens_padded, layout.max_seqlen
        out = varlen_attention(q, k, v, *cuts, scale, causal=True, window=mask_spec.window)

        def make() -> _SpanCall | None:
            spans: list[_Span] = []
            for start, length in zip(starts(layout.padded_lengths), layout.padded_lengths, strict=True):
                spans += _Chunk(start, start, start + length, start).spans(mask_spec)
            return _SpanCall.from_spans(spans, len(q), q.device)

        span_call = layout.kept(("spans", *mask_spec.name), make)
        return _attend_spans(out, q, k, v, span_call, scale, mask_spec)
    layout.refuse_static_shapes("attention without a varlen kernel")
    if layout.num_segments * max(layout.lengths) <= 2 * layout.total:
        mask = None
        if not mask_spec.plain:
            name = ("rows", mask_spec.window, q.dtype, q.device)
            mask = mask_spec.bidirectional.kept(name, partial(_side_by_side_mask, layout, mask_spec, q))
        q, k, v = (layout.unpack(x[None]).transpose(1, 2) for x in (q, k, v))  # (S, H, L, D)
        return layout.pack(sdpa(q, k, v, scale, causal=mask is None, mask=mask).transpose(1, 2))[0]
    pieces, start = [], 0
    for length in layout.padded_lengths:
        segment, start = slice(start, start + length), start + length
        mask = _mask(layout, mask_spec, (segment.start, segment.start, start), length, q)
        pieces.append(_one_segment(q[segment], k[segment], v[segment], scale, mask))
    return torch.cat(pieces)


def _has_flash_with(x: Tensor, mask_spec: AttentionMaskSpec) -> bool:
    """Whether PyTorch's varlen flash attention takes x, and a window where there is one: from PyTorch 2.11 on."""
    if mask_spec.window is None or not has_flash(x):
        return has_flash(x)
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in _arguments(varlen_attn)


def _one_segment(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """(L, H, D) against (L', G, D), L <= L': by `mask` (L, L'), or causal and aligned at the end."""
    length, prefix = q.shape[0], k.shape[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if mask is None and length == prefix:
        return sdpa(q, k, v, scale, causal=True)[0].transpose(0, 1)
    if mask is None:
        mask = torch.ones(length, prefix, dtype=torch.bool, device=q.device).tril(prefix - length)
    return sdpa(q, k, v, scale, causal=False, mask=mask)[0].transpose(0, 1)


def _side_by_side_mask(layout: PackedLayout, mask_spec: AttentionMaskSpec, like: Tensor) -> Tensor:
    """(S, 1, L, L) in the dtype and on the device of `like`: 0 where a query sees a key, else minus infinity."""
    ahead = mask_spec.bidirectional.horizon(layout.total, like.device) - torch.arange(layout.total, device=like.device)
    queries = torch.arange(max(layout.lengths), device=like.device)
    last = queries + layout.unpack(ahead[None])  # (S, L); a row's padding sees itself
    return _additive(queries, last[:, None], queries, mask_spec, like)


def _mask(
    layout: PackedLayout, mask_spec: AttentionMaskSpec, span: tuple[int, int, int], length: int, like: Tensor
) -> Tensor | None:
    """(L, L') of `length` queries from token span[0] on against the keys [span[1], span[2]) of the row; None: causal."""
    if mask_spec.plain:
        return None
    first, start, stop = span

    def make() -> Tensor:
        queries = torch.arange(first, first + length, device=like.device)
        last = mask_spec.bidirectional.horizon(layout.total, like.device)[first : first + length]
        return _additive(queries, last, torch.arange(start, stop, device=like.device), mask_spec, like)

    return mask_spec.bidirectional.kept((span, length, mask_spec.window, like.dtype, like.device), make)


def _additive(queries: Tensor, last: Tensor, keys: Tensor, mask_spec: AttentionMaskSpec, like: Tensor) -> Tensor:
    """(..., L, L') of queries at `queries` (L,) that see up to `last` (..., L), and of `keys` (L',)."""
    seen = keys <= last[..., None]
    if mask_spec.window is not None:
        seen = seen & (keys > queries[:, None] - mask_spec.window)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    scale: float,
    group: ProcessGroup,
    mask_spec: AttentionMaskSpec = CAUSAL,
) -> Tensor:
    """Context parallel attention: this rank's queries against the keys and values of all ranks.

    q (T/cp, H, D), k and v (T/cp, G, D) hold this rank's zigzag chunks (`layout.cp_index`). Keys and values
    are gathered and put back in row order; chunk r of a segment (the front) sees its first r+1 chunks,
    chunk 2*cp-1-r (the back) its first 2*cp-r, both causal at the end.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    size, rank = group.size(), group.rank()
    whole = gather_from_sequence_parallel_region(torch.cat((k, v), dim=1), group=group)
    whole = in_row_order(whole, layout, size)
    k, v = whole.split(k.shape[1], dim=1)
    mask_spec = mask_spec.within(layout.max_seqlen)
    if not _has_flash_with(q, mask_spec):
        chunks = layout.kept(("cp chunks", rank, size), lambda: _chunks(layout, rank, size))
        return torch.cat([chunk.masked(q, k, v, layout, scale, mask_spec) for chunk in chunks])
    name = ("cp", rank, size, *mask_spec.name)
    call, span_call = layout.kept(name, lambda: _chunk_calls(layout, rank, size, mask_spec, q.device))
    out = call(q, k, v, scale, causal=True, window=mask_spec.window)
    return _attend_spans(out, q, k, v, span_call, scale, mask_spec)


@dataclass(frozen=True)
class _Call:
    """Segments of queries, and the keys in a row that each sees, as a varlen call takes them; the same for all layers."""

    queries: Tensor  # (S + 1,) int32 offsets of the segments
    longest: int  # the most queries of one
    keys: Tensor  # (K,) int64, the keys of each segment in the row, one after another
    key_offsets: Tensor  # (S + 1,) int32 offsets of the segments in `keys`
    longest_key: int  # the most keys of one

    @classmethod
    def from_spans(cls, lengths: Sequence[int], spans: Sequence[tuple[int, int]], device: torch.device) -> _Call:
        """The call for segments of so many queries, each of which sees keys [first, stop) of the row."""
        keys = [stop - start for start, stop in spans]
        tensors = offsets(lengths), ragged(keys, [start for start, _ in spans]), offsets(keys)
        queries, index, key_offsets = (cpu_to_device(tensor, device) for tensor in tensors)
        return cls(queries, max(lengths), index, key_offsets, max(keys))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int | None) -> Tensor:
        """Attention of the segments' queries against keys and values of the row."""
        k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        keys = self.key_offsets, self.longest_key
        return varlen_attention(
            q, k, v, self.queries, self.longest, scale, causal=causal, window=window, key_segments=keys
        )


def _chunk_calls(
    layout: PackedLayout, rank: int, size: int, mask_spec: AttentionMaskSpec, device: torch.device
) -> tuple[_Call, _SpanCall | None]:
    """What a context-parallel rank's chunks see up to themselves, and what their bidirectional spans see."""
    chunks = _chunks(layout, rank, size)
    keys = [(mask_spec.first_key(chunk.start, chunk.first), chunk.stop) for chunk in chunks]
    lengths = [chunk.stop - chunk.first for chunk in chunks]
    spans = [span for chunk in chunks for span in chunk.spans(mask_spec)]
    return _Call.from_spans(lengths, keys, device), _SpanCall.from_spans(spans, sum(lengths), device)


@dataclass(frozen=True)
class _Span:
    """Queries of a rank that are in one bidirectional span, and the keys that they see."""

    first: int  # the first query among the rank's
    count: int
    missing: int  # tokens of the span behind them, which other ranks hold
    start: int  # keys, in the row
    stop: int


@dataclass(frozen=True)
class _Chunk:
    """Neighbours [first, stop) of the row that a rank holds from its query `at` on, of a segment that begins at `start`."""

    at: int
    first: int
    stop: int
    start: int

    def spans(self, mask_spec: AttentionMaskSpec) -> list[_Span]:
        spans = []
        for begin, end in mask_spec.bidirectional.within(self.first, self.stop):
            first, stop = max(begin, self.first), min(end, self.stop)
            key = mask_spec.first_key(self.start, first)
            spans.append(_Span(self.at + first - self.first, stop - first, end - stop, key, end))
        return spans

    def masked(
        self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        """Its queries against the keys and values of the row."""
        length = self.stop - self.first
        start = mask_spec.first_key(self.start, self.first)
        stop = max([self.stop, *(end for _, end in mask_spec.bidirectional.within(self.first, self.stop))])
        mask = _mask(layout, mask_spec, (self.first, start, stop), length, q)
        return _one_segment(q[self.at : self.at + length], k[start:stop], v[start:stop], scale, mask)


def _chunks(layout: PackedLayout, rank: int, size: int) -> list[_Chunk]:
    """The front and the back chunk of each segment, in the order in which a rank of `size` holds them."""
    chunks, offset = [], 0
    for start, length in zip(starts(layout.padded_lengths), layout.padded_lengths, strict=True):
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            first = start + number * chunk
            chunks.append(_Chunk(offset, first, first + chunk, start))
            offset += chunk
    return chunks


@dataclass(frozen=True)
class _SpanCall:
    """The varlen call of a rank's queries that are in bidirectional spans."""

    call: _Call  # what each span sees
    queries: Tensor  # (Q,) int64, the spans' queries among the rank's, whose number stands for one of another rank
    held: Tensor  # (Q',) int64, those of `queries` that the rank has itself
    held_queries: Tensor  # (Q',) int64, where these are among the rank's

    @classmethod
    def from_spans(cls, spans: Sequence[_Span], queries: int, device: torch.device) -> _SpanCall | None:
        """The call for spans of a rank with so many queries; None if there are no spans."""
        if not spans:
            return None
        lengths = [span.count + span.missing for span in spans]
        rows: list[int] = []
        held: list[int] = []
        for span in spans:
            held += range(len(rows), len(rows) + span.count)
            rows += [*range(span.first, span.first + span.count), *[queries] * span.missing]
        rows_index, held_index = (cpu_to_device(torch.tensor(x), device) for x in (rows, held))
        call = _Call.from_spans(lengths, [(span.start, span.stop) for span in spans], device)
        return cls(call, rows_index, held_index, rows_index.index_select(0, held_index))


def _attend_spans(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span_call: _SpanCall | None,
    scale: float,
    mask_spec: AttentionMaskSpec,
) -> Tensor:
    """`out` (T, H, D) of causal attention with the rows of bidirectional spans replaced: each sees the keys up to its span's end.

    Flash attention aligns a window at the end of its keys, so queries that other ranks hold are filled in with zeros.
    """
    if span_call is None:
        return out
    whole = torch.cat((q, q.new_zeros(1, *q.shape[1:]))).index_select(0, span_call.queries)
    attended = span_call.call(whole, k, v, scale, causal=False, window=mask_spec.window)
    return out.index_copy(0, span_call.held_queries, attended.index_select(0, span_call.held))
