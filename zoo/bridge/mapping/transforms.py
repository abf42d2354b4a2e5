"""Transforms between the tensors of a Hugging Face layout and one zoo tensor, each with its exact inverse.

A transform is two functions: `to_zoo` takes the HF tensors in the order of the layout's patterns and makes
the full (unsharded) zoo tensor, `to_hf` undoes it to the bit. Both only move elements about, so they also run
on meta tensors, which is how shapes are checked before any data is read. Where a zoo tensor stacks experts,
transforms see one expert at a time, whatever the file's layout (`zoo.bridge.mapping.table.Layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zoo.types import JsonMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The numbers of an architecture that transforms need; all other sizes are read off the model's shapes."""

    heads: int  # query heads
    kv_heads: int  # key/value heads: Megatron-Core's query groups
    head_dim: int  # width of a head
    full_kv_heads: int = 0  # key heads of layers without a window, where they are others
    experts: int = 0  # routed experts of a MoE layer, 0 for a dense model
    vocabulary: int = 0  # tokens of embedding and head, 0 where tensor parallel ranks divide them
    linear_keys: int = 0  # of a linear-attention layer: width of all its keys (and of all its queries)
    linear_key_heads: int = 0  # key heads
    linear_values: int = 0  # width of all its values
    linear_value_heads: int = 0  # value heads
    tied: bool = False  # output layer shares the embedding's weight (the top-level tie_word_embeddings)
    parts: Mapping[str, Dims] = field(default_factory=dict)  # of further decoders in the model, by their names

    @classmethod
    def from_hf(cls, text_config: PretrainedConfig | JsonMapping, *, tied: bool = False) -> Dims:
        """Read an HF text config (object or dict); `tied` is the top-level config's value, not the text config's.

        `head_dim` falls back to hidden_size // num_attention_heads, as in HF's attention classes.
        """
        read = text_config.get if isinstance(text_config, Mapping) else partial(getattr, text_config)
        heads = read("num_attention_heads", None)
        key_heads, value_heads = (read(f"linear_num_{part}_heads", None) or 0 for part in ("key", "value"))
        return cls(
            heads=heads,
            kv_heads=read("num_key_value_heads", None) or heads,
            head_dim=read("head_dim", None) or read("hidden_size", None) // heads,
            full_kv_heads=getattr(read("full_heads", None), "groups", 0),
            experts=read("num_experts", None) or 0,
            vocabulary=read("vocab_size", None) or 0,
            linear_keys=key_heads * (read("linear_key_head_dim", None) or 0),
            linear_key_heads=key_heads,
            linear_values=value_heads * (read("linear_value_head_dim", None) or 0),
            linear_value_heads=value_heads,
            tied=tied,
        )


class Transform(Protocol):
    """HF tensors <-> one zoo tensor; raises RuntimeError or ValueError on shapes it cannot take."""

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor: ...

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]: ...


@dataclass(frozen=True)
class Copy:
    """The tensor as it is."""

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        (tensor,) = parts
        return tensor

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transposed:
    """A matrix [in, out] <-> [out, in]."""

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        (tensor,) = parts
        return tensor.T

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        return [tensor.T]


@dataclass(frozen=True)
class QKV:
    """q_proj [heads*d, ...], k_proj and v_proj [kv_heads*d, ...] <-> linear_qkv [(heads + 2*kv_heads)*d, ...].

    Per query group: its heads/kv_heads query heads, then its key head, then its value head
    (megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors). Biases go the same way.
    """

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        tail = parts[0].shape[1:]
        grouped = [part.reshape(dims.kv_heads, -1, dims.head_dim, *tail) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *tail)

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        ratio, tail = dims.heads // dims.kv_heads, tensor.shape[1:]
        grouped = tensor.reshape(dims.kv_heads, ratio + 2, dims.head_dim, *tail)
        return [part.reshape(-1, *tail) for part in grouped.split([ratio, 1, 1], dim=1)]


@dataclass(frozen=True)
class OfPart:
    """A transform of a further decoder, by that one's dims."""

    part: str
    transform: Transform

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return self.transform.to_zoo(parts, dims.parts[self.part])

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        return self.transform.to_hf(tensor, dims.parts[self.part])


@dataclass(frozen=True)
class QK:
    """As `QKV`, without values, in layers whose heads are those of `full_kv_heads`.

    q_proj [heads*d, ...], k_proj [full_kv_heads*d, ...] <-> linear_qk [(heads + full_kv_heads)*d, ...].
    """

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        tail = parts[0].shape[1:]
        grouped = [part.reshape(dims.full_kv_heads, -1, *tail) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *tail)

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        ratio, tail = dims.heads // dims.full_kv_heads, tensor.shape[1:]
        grouped = tensor.reshape(dims.full_kv_heads, ratio + 1, -1, *tail)
        return [part.reshape(-1, *tail) for part in grouped.split([ratio, 1], dim=1)]


@dataclass(frozen=True)
class GatedQKV:
    """As `QKV`, where q_proj [heads*2*d, ...] holds an output gate behind each query head.

    Per query group: its query heads, then their gates in the same order, then its key head, then its value head
    (get_query_key_value_tensors with output_gate).
    """

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        query, key, value = parts
        tail = query.shape[1:]
        pairs = query.reshape(dims.kv_heads, -1, 2, dims.head_dim, *tail)  # (group, head, query or gate, ...)
        grouped = [pairs[:, :, 0], pairs[:, :, 1]]
        grouped += [part.reshape(dims.kv_heads, 1, dims.head_dim, *tail) for part in (key, value)]
        return torch.cat(grouped, dim=1).reshape(-1, *tail)

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        ratio, tail = dims.heads // dims.kv_heads, tensor.shape[1:]
        grouped = tensor.reshape(dims.kv_heads, 2 * ratio + 2, dims.head_dim, *tail)
        query, gate, key, value = grouped.split([ratio, ratio, 1, 1], dim=1)
        pairs = torch.stack((query, gate), dim=2)
        return [part.reshape(-1, *tail) for part in (pairs, key, value)]


@dataclass(frozen=True)
class Rows:
    """Tensors one below the other; `sizes` says of an architecture how many rows each has."""

    sizes: Callable[[Dims], tuple[int, ...]]

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return torch.cat(list(parts))

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        return list(tensor.split(self.sizes(dims)))


@dataclass(frozen=True)
class GateUp:
    """gate_proj [I, H], up_proj [I, H] <-> linear_fc1 [2I, H], gate first (as Megatron-Core's SwiGLU splits it)."""

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        gate, up = parts
        if gate.shape != up.shape:
            raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} differ")
        return torch.cat([gate, up])

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        if tensor.shape[0] % 2:
            raise ValueError(f"gate and up cannot halve {list(tensor.shape)}")
        return list(tensor.chunk(2))
