"""Self-attention of the decoder: rotary by explicit angles, then a core attention that knows packing.

`SelfAttention` is mcore's with a forward of its own: mcore's would cut the angles by cu_seqlens on the host
for every call (a device sync a layer) and zigzag the whole pack under context parallelism.

`VarlenCoreAttention` is the torch backend's core: PyTorch's varlen flash attention on a GPU, scaled dot
product attention elsewhere (and for fp32): `zoo.nn.decoder.attention.varlen`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention as McoreSelfAttention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.rotary import apply_rotary
from zoo.nn.decoder.attention.varlen import AttentionMaskSpec, gathered_attention, sdpa, segment_attention
from zoo.nn.decoder.config import layer_config
from zoo.nn.decoder.norm import RMSNorm
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.kernels import fused
from zoo.packing import PackedLayout
from zoo.packing.spans import BidirectionalSpans


@dataclass
class SeqParams(PackedSeqParams):
    """mcore's description of a packed row, with the layout it was made from.

    `layout` is the packed row, or None for a padded (B, T) batch; it lives on the device of the call, and knows nothing
    of a padded batch that the row came from. `cache` is what a generation's passes share; None in training. `bidirectional` are
    the runs of the row, or of the batch, that attend to one another both ways. `cut`: context-parallel ranks hold chunks of each segment;
    otherwise the row is one rank's, whose segments are on no other.
    """

    layout: PackedLayout | None = None
    cache: DecodeCache | None = None
    bidirectional: BidirectionalSpans = field(default_factory=BidirectionalSpans)
    cut: bool = True

    @classmethod
    def from_layout(
        cls,
        layout: PackedLayout,
        cp_group: ProcessGroup | None = None,
        bidirectional: BidirectionalSpans | None = None,
        cut: bool = True,
    ) -> SeqParams:
        """`layout` as mcore (and Transformer Engine) takes it, with the layout itself."""
        layout = layout.without_batch()
        params = cls(layout=layout, bidirectional=bidirectional or BidirectionalSpans(), cut=cut)
        params.__dict__.update(vars(layout.packed_seq_params(cp_group)))  # mcore's own checks would sync
        return params


class SelfAttention(McoreSelfAttention):
    """QKV, rotary, core attention, optional output gate, projection. Input and output (T, B, hidden).

    Where values are keys, one linear gives queries and keys, `linear_qk`, laid out as megatron-core's of all three.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, **more: object
    ) -> None:
        config = layer_config(config, layer_number)
        self.values_are_keys = getattr(config, "values_are_keys", False)
        if self.values_are_keys:
            assert config.kv_channels and config.num_query_groups
            values = config.kv_channels * config.num_query_groups
            # megatron-core would not call a function.
            submodules = replace(submodules, linear_qkv=partial(_without_values, submodules.linear_qkv, values))
        if getattr(config, "output_bias", False):
            submodules = replace(submodules, linear_proj=partial(_biased, submodules.linear_proj))
        super().__init__(config, submodules, layer_number, **more)
        if self.values_are_keys:
            self.linear_qk = self.linear_qkv
            del self.linear_qkv
        if config.qk_layernorm and config.softmax_scale == 1.0:
            # Random weights then begin with logits as wide as those that are divided by sqrt(D).
            for norm in (self.q_layernorm, self.k_layernorm):
                torch.nn.init.constant_(norm.weight, self.hidden_size_per_attention_head**-0.25)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """(T, B, heads or groups, D) each, queries and keys normed, and values where the config says so."""
        if self.values_are_keys:
            mixed, _ = self.linear_qk(hidden_states)
            width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
            mixed = mixed.view(*mixed.shape[:2], groups, -1)
            query, value = mixed.split([mixed.shape[-1] - width, width], dim=-1)
            query = self.q_layernorm(query.reshape(*mixed.shape[:2], -1, width))
            key, gate = self.k_layernorm(value), []
        else:
            query, key, value, *gate = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if getattr(self.config, "value_norm", False):
            value = F.rms_norm(value, value.shape[-1:], None, self.config.layernorm_epsilon)
        return query, key, value, *gate

    @property
    def is_plain(self) -> bool:
        """Whether a linear gives whole groups of heads, to which nothing is done but norms and the rotary embedding: see `turned_heads`."""
        shared = self.config.num_query_groups < self.world_size  # ranks with parts of a group of heads
        return not (shared or self.values_are_keys or getattr(self.config, "value_norm", False))

    def turned_heads(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Split the linear's result (T, B, width) into heads, norm queries and keys, and rotate them by angles `cos` and `sin` (T, B, 1, D).

        Heads are split as megatron-core splits them. On a GPU one kernel does all of it.

        Returns:
            Queries, keys and values (T, B, heads or groups, D); gates (T, B, groups, heads of a group, D) where the config says so.
        """
        gated, lead = bool(self.config.attention_output_gate), mixed.shape[:2]
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        repeats = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(*lead, groups, -1, width)
        norms = (self.q_layernorm, self.k_layernorm)
        if fused(mixed) and (norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms)):
            from zoo.nn.kernels.rotary import Norms, split_heads

            of_queries, of_keys = norms
            known = None
            if of_queries is not None:
                known = Norms(of_queries.weight, of_keys.weight, of_queries.eps, of_queries.zero_centered)
            angles = [x.reshape(-1, x.shape[-1]) for x in (cos, sin)]
            heads = split_heads(mixed.flatten(0, 1), angles[0], angles[1], repeats, gated, known)
            return [x.unflatten(0, lead) for x in heads]
        query, *gate, key, value = mixed.split([repeats] * (2 if gated else 1) + [1, 1], dim=3)
        rotated = (
            apply_rotary(x if norm is None else norm(x), cos, sin)
            for x, norm in zip((query.flatten(2, 3), key.squeeze(3)), norms, strict=True)
        )
        return [*rotated, value.squeeze(3), *gate]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """`rotary_pos_emb`: cos and sin (T, B, 1, D) of this rank's tokens."""
        refuse_unused("SelfAttention", {**unused, "attention_mask": attention_mask})
        gated = self.config.attention_output_gate
        if rotary_pos_emb is not None and self.is_plain:
            mixed, _ = self.linear_qkv(hidden_states)
            query, key, value, *gate = self.turned_heads(mixed, *rotary_pos_emb)
        else:
            query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
            if rotary_pos_emb is not None:
                query = apply_rotary(query, *rotary_pos_emb)
                key = apply_rotary(key, *rotary_pos_emb)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        cache: DecodeCache | None = getattr(packed_seq_params, "cache", None)
        if cache is not None and cache.decoding:
            window = attention_window(self.config, self.layer_number)
            out = cache.attend(self.layer_number, query, key, value, self.config.softmax_scale, window)
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
        out, bias = self.linear_proj(output_gate(out, gate[0].reshape(out.shape)) if gate else out)
        return out if bias is None else out + bias, None


def _without_values(
    linear: Callable[..., torch.nn.Module], values: int, inputs: int, outputs: int, **more: object
) -> torch.nn.Module:
    """The linear of queries, keys and values without the rows of the last."""
    return linear(inputs, outputs - values, **more)


def _biased(linear: Callable[..., torch.nn.Module], *args: object, **more: object) -> torch.nn.Module:
    """A linear with a bias, whatever the config says of biases of all linears."""
    return linear(*args, **{**more, "bias": True})


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate). Not mcore's _apply_output_gate, which is compiled at its first call: 20 s of C++ on a CPU."""
    if fused(x):
        from zoo.nn.kernels.gate import gated

        return gated(x, gate)
    return (x * torch.sigmoid(gate.float())).to(x.dtype)


def attention_window(config: TransformerConfig, layer_number: int) -> int | None:
    """The most keys, its own included, that a token sees in a layer (counted from 1); None: all before it."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    assert config.window_size is not None
    return config.window_size[0] + 1


class VarlenCoreAttention(torch.nn.Module):
    """Causal attention within each segment of a packed row, or within each row of a padded batch.

    A layer's window and the call's runs (`SeqParams.bidirectional`) say what else a token sees: `zoo.nn.decoder.attention.varlen`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection = None,
        cp_comm_type: str | None = None,
        **unused: object,
    ) -> None:
        """mcore's arguments; `cp_comm_type` says how keys are exchanged, of which there is one way here."""
        super().__init__()
        asked = {
            "attention_dropout": config.attention_dropout,
            "window_size": bool(config.window_size and config.window_size[1]),  # one that looks ahead
            **unused,
            **_other_than_causal(attn_mask_type),
        }
        refuse_unused("VarlenCoreAttention", asked)
        if attention_type != "self":
            raise NotImplementedError(f"VarlenCoreAttention is for self-attention, not {attention_type!r}")
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.cp_size = config.context_parallel_size
        self.window = attention_window(config, layer_number)
        self.two_way_in_windows = getattr(config, "two_way_in_windows", False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> Tensor:
        """query (T, H, D), key and value (T, G, D) with SeqParams; without, (T, B, H or G, D)."""
        asked = {**unused, "attention_mask": attention_mask, **_other_than_causal(attn_mask_type)}
        refuse_unused("VarlenCoreAttention", asked)
        if packed_seq_params is not None and not hasattr(packed_seq_params, "layout"):
            raise NotImplementedError(
                "VarlenCoreAttention takes a packed row by its layout: hand over zoo.nn.decoder.attention.self_attention.SeqParams"
            )
        layout = getattr(packed_seq_params, "layout", None)
        bidirectional = getattr(packed_seq_params, "bidirectional", None)
        if self.window is None and self.two_way_in_windows:
            bidirectional = None
        mask_spec = AttentionMaskSpec(self.window, bidirectional or BidirectionalSpans())
        if layout is not None:
            assert isinstance(packed_seq_params, SeqParams)
            if not packed_seq_params.cut:
                return segment_attention(query, key, value, layout, self.scale, mask_spec)
            return self._attend(query, key, value, layout, mask_spec)
        if self.cp_size > 1 or not mask_spec.plain:  # B segments of T tokens, each cut in zigzag over the ranks
            tokens, batch = query.shape[:2]
            layout = uniform_layout(batch, tokens * self.cp_size).to(query.device)
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            return self._attend(q, k, v, layout, mask_spec).unflatten(0, (batch, tokens)).transpose(0, 1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return sdpa(q, k, v, self.scale, causal=True).permute(2, 0, 1, 3)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        if self.cp_size > 1:
            return gathered_attention(query, key, value, layout, self.scale, self.cp_group, mask_spec)
        return segment_attention(query, key, value, layout, self.scale, mask_spec)


def _other_than_causal(kind: AttnMaskType | None) -> dict[str, object]:
    """Arguments of core attention that ask for a mask other than a causal one."""
    return {} if kind in (None, AttnMaskType.causal, AttnMaskType.padding_causal) else {"attn_mask_type": kind}


@lru_cache(maxsize=8)
def uniform_layout(rows: int, length: int) -> PackedLayout:
    """`rows` segments of `length` tokens: what a padded batch is to code that works on packed rows."""
    return PackedLayout.from_lengths([length] * rows)
