"""Self-attention of the decoder: rotary by explicit angles, then a core attention that knows packing.

`SelfAttention` is mcore's with a forward of its own: mcore's would cut the angles by cu_seqlens on the host
for every call (a device sync a layer) and zigzag the whole pack under context parallelism.

`VarlenCoreAttention` is the torch backend's core: PyTorch's varlen flash attention on a GPU, scaled dot
product attention elsewhere (and for fp32). Context parallelism gathers keys and values and makes two
calls, since a rank holds a front and a back chunk of every segment.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention as McoreSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.decoder.cache import DecodeCache
from zoo.nn.decoder.rotary import apply_rotary
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.kernels import fused
from zoo.nn.kernels.widths import flash4_width, flash_takes
from zoo.packing import PackedLayout


@dataclass
class SeqParams(PackedSeqParams):
    """mcore's description of a packed row, with the layout it was made from.

    `layout` is the packed row, or None for a padded (B, T) batch; it lives on the device of the call, and knows nothing
    of a padded batch that the row came from. `cache` is what a generation's passes share; None in training.
    """

    layout: PackedLayout | None = None
    cache: DecodeCache | None = None

    @classmethod
    def of(cls, layout: PackedLayout, cp_group: Any = None) -> SeqParams:
        """`layout` as mcore (and Transformer Engine) takes it, with the layout itself."""
        layout = layout.without_batch()
        params = cls(layout=layout)
        params.__dict__.update(vars(layout.packed_seq_params(cp_group)))  # mcore's own checks would sync
        return params


class SelfAttention(McoreSelfAttention):
    """QKV, rotary, core attention, optional output gate, projection. Input and output (T, B, hidden)."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`rotary_pos_emb`: cos and sin (T, B, 1, D) of this rank's tokens."""
        refuse_unused("SelfAttention", {**unused, "attention_mask": attention_mask})
        gated = self.config.attention_output_gate
        query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        if rotary_pos_emb is not None:
            query = apply_rotary(query, *rotary_pos_emb)
            key = apply_rotary(key, *rotary_pos_emb)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        cache: DecodeCache | None = getattr(packed_seq_params, "cache", None)
        if cache is not None and cache.decoding:
            out = cache.attend(self.layer_number, query, key, value)
        else:
            out = self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                packed_seq_params=packed_seq_params,
            )
            if cache is not None:
                layout = getattr(packed_seq_params, "layout", None)
                assert layout is not None, "a cache is filled from packed prompts"
                cache.keep_prompts(self.layer_number, key, value, layout)
        out = out.reshape(out.shape[0], 1 if packed else out.shape[1], -1)  # packed: no batch axis
        return self.linear_proj(output_gate(out, gate[0].reshape(out.shape)) if gate else out)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate). Not mcore's _apply_output_gate, which is compiled at its first call: 20 s of C++ on a CPU."""
    if fused(x):
        from zoo.nn.kernels.gate import gated

        return gated(x, gate)
    return (x * torch.sigmoid(gate.float())).to(x.dtype)


class VarlenCoreAttention(torch.nn.Module):
    """Causal attention within each segment of a packed row, or within each row of a padded batch."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        cp_comm_type: str | None = None,
        **unused: Any,
    ) -> None:
        """mcore's arguments; `cp_comm_type` says how keys are exchanged, of which there is one way here."""
        super().__init__()
        windows = {"attention_dropout": config.attention_dropout, "window_size": config.window_size}
        refuse_unused("VarlenCoreAttention", {**windows, **unused, **_other_than_causal(attn_mask_type)})
        if attention_type != "self":
            raise NotImplementedError(f"VarlenCoreAttention is for self-attention, not {attention_type!r}")
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.cp_size = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """query (T, H, D), key and value (T, G, D) with SeqParams; without, (T, B, H or G, D)."""
        asked = {**unused, "attention_mask": attention_mask, **_other_than_causal(attn_mask_type)}
        refuse_unused("VarlenCoreAttention", asked)
        if packed_seq_params is not None and not hasattr(packed_seq_params, "layout"):
            raise NotImplementedError(
                "VarlenCoreAttention takes a packed row by its layout: hand over zoo.nn.decoder.attention.SeqParams"
            )
        layout = getattr(packed_seq_params, "layout", None)
        if layout is not None:
            if self.cp_size > 1:
                return gathered_attention(query, key, value, layout, self.scale, self.cp_group)
            return segment_attention(query, key, value, layout, self.scale)
        if self.cp_size > 1:
            return self._padded_over_ranks(query, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return sdpa(q, k, v, self.scale, causal=True).permute(2, 0, 1, 3)

    def _padded_over_ranks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(T/cp, B, H, D) of a padded batch: B segments of T tokens, each cut in zigzag over the ranks."""
        tokens, batch = query.shape[:2]
        layout = uniform_layout(batch, tokens * self.cp_size).to(query.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = gathered_attention(q, k, v, layout, self.scale, self.cp_group)
        return out.unflatten(0, (batch, tokens)).transpose(0, 1)


def _other_than_causal(kind: Any) -> dict[str, Any]:
    """What asks for another mask than a causal one."""
    return (
        {} if kind in (None, AttnMaskType.causal, AttnMaskType.padding_causal) else {"attn_mask_type": kind}
    )


@lru_cache(maxsize=8)
def uniform_layout(rows: int, length: int) -> PackedLayout:
    """`rows` segments of `length` tokens: what a padded batch is to code that works on packed rows."""
    return PackedLayout.from_lengths([length] * rows)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
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
    found = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    warnings.filterwarnings("ignore", "Argument aux_data")  # its compiler's, of an argument that isn't given
    return bool(found) and torch.cuda.get_device_capability(device)[0] == 9


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
    *,
    causal: bool,
    of_keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Flash attention of q (T, H, D) against k and v (T', G, D), a GPU in half precision, within segments.

    Segments of q begin at `offsets` (S + 1,), the longest has `longest` tokens; `of_keys` says the same of k and v, where
    they are cut otherwise. Causal attention is aligned at a segment's end. FlashAttention 4 where it is installed (twice
    as fast on Hopper), else PyTorch's.
    """
    offsets = offsets.to(torch.int32)
    key_offsets, longest_key = of_keys or (offsets, longest)
    if has_flash4(q):
        from flash_attn.cute.interface import flash_attn_varlen_func

        head = q.shape[-1]
        if (wider := flash4_width(head)) is not None and wider > head:
            q, k, v = (F.pad(x, (0, wider - head)) for x in (q, k, v))
        out = flash_attn_varlen_func(
            q,
            k,
            v,
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

    how: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    if "window_size" not in _arguments(varlen_attn):  # PyTorch 2.10, which scales by the width
        q = q * (scale * math.sqrt(q.shape[-1]))
        how = {"is_causal": causal}
    out = varlen_attn(q, k, v, offsets, key_offsets, longest, longest_key, **how)
    assert isinstance(out, Tensor)
    return out


@lru_cache
def _arguments(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Causal attention of (T, H, D) against (T, G, D) within the segments of `layout`.

    Padding stands at segment ends, so the padded offsets give right results for every real token
    (a causal token looks only back); what a padding token gets is finite and unused.
    """
    if has_flash(q):
        return varlen_attention(q, k, v, layout.cu_seqlens_padded, layout.max_seqlen, scale, causal=True)
    if layout.num_segments * max(layout.lengths) <= 2 * layout.total:
        q, k, v = (layout.unpack(x[None]).transpose(1, 2) for x in (q, k, v))  # (S, H, L, D)
        return layout.pack(sdpa(q, k, v, scale, causal=True).transpose(1, 2))[0]
    queries, keys, values = (x.split(list(layout.padded_lengths)) for x in (q, k, v))
    pieces = zip(queries, keys, values, strict=True)
    return torch.cat([_one_segment(*piece, scale) for piece in pieces])


def _one_segment(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(L, H, D) against (L', G, D), L <= L', causal and aligned at the end."""
    length, prefix = q.shape[0], k.shape[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if length == prefix:
        return sdpa(q, k, v, scale, causal=True)[0].transpose(0, 1)
    mask = torch.ones(length, prefix, dtype=torch.bool, device=q.device).tril(prefix - length)
    return sdpa(q, k, v, scale, causal=False, mask=mask)[0].transpose(0, 1)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, group: Any
) -> Tensor:
    """Context parallel attention: this rank's queries against the keys and values of all ranks.

    q (T/cp, H, D), k and v (T/cp, G, D) hold this rank's zigzag chunks (`layout.cp_index`). Keys and values
    are gathered and put back in row order; chunk r of a segment (the front) sees its first r+1 chunks,
    chunk 2*cp-1-r (the back) its first 2*cp-r, both causal at the end.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    size, rank = group.size(), group.rank()
    whole = gather_from_sequence_parallel_region(torch.cat((k, v), dim=1), group=group)
    whole = whole.index_select(0, layout.cp_restore_index(size))
    k, v = whole.split(k.shape[1], dim=1)
    chunks = [length // (2 * size) for length in layout.padded_lengths]
    starts = [0]
    for length in layout.padded_lengths:
        starts.append(starts[-1] + length)
    halves = []
    queries = q.split([c for c in chunks for _ in range(2)])  # front and back of each segment
    for side, seen in ((0, rank + 1), (1, 2 * size - rank)):
        mine = list(queries[side::2])
        prefix = [(start, start + seen * chunk) for start, chunk in zip(starts, chunks, strict=False)]
        halves.append(_prefix_attention(mine, k, v, prefix, scale))
    interleaved = [half for pair in zip(*halves, strict=True) for half in pair]
    return torch.cat(interleaved)


def _prefix_attention(
    queries: list[Tensor], k: Tensor, v: Tensor, spans: list[tuple[int, int]], scale: float
) -> list[Tensor]:
    """Each (L, H, D) of `queries` against its span of k and v (T, G, D), causal and aligned at the end."""
    if not has_flash(k):
        return [_one_segment(q, k[a:b], v[a:b], scale) for q, (a, b) in zip(queries, spans, strict=True)]
    from zoo.packing.index import host_to_device, offsets

    lengths = [q.shape[0] for q in queries]
    index = host_to_device(torch.cat([torch.arange(a, b) for a, b in spans]), k.device)
    cu_q = host_to_device(offsets(lengths), k.device)
    cu_k = host_to_device(offsets([b - a for a, b in spans]), k.device)
    out = varlen_attention(
        torch.cat(queries),
        k.index_select(0, index),
        v.index_select(0, index),
        cu_q,
        max(lengths),
        scale,
        causal=True,
        of_keys=(cu_k, max(b - a for a, b in spans)),
    )
    return list(out.split(lengths))
