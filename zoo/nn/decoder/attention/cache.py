"""`DecodeCache`: what the decoder's layers remember of S sequences between the forward passes of a generation.

The first pass is that of training over the packed prompts, and fills the cache. Each later pass takes one token of every
sequence. The cache travels in `SeqParams.cache`, so the modules keep nothing:

    softmax attention   keys and values (S, G, capacity, D) of all tokens so far, rotated already
    gated delta net     the last K - 1 inputs of the convolution (S, K - 1, C), and the state (S, G, K, V) in fp32

megatron-core's inference contexts do not fit: the static one has one length for all sequences of a batch and no packed
prompts, the dynamic one needs paged kernels of a GPU, and neither holds the state of a delta net over packed rows.

Memory: 2 * layers * S * capacity * G * D numbers in the dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.packing import PackedLayout


@dataclass
class DecodeCache:
    """State of `sequences` sequences of at most `capacity` tokens each, on this rank.

    Attributes:
        sequences: S.
        capacity: most tokens of a sequence that are kept.
        lengths: (S,) int64 tokens of each sequence so far, on the device; None until the prompts have been read.
        longest: the most of these, on the host.
    """

    sequences: int
    capacity: int
    lengths: Tensor | None = None
    longest: int = 0
    _keys: dict[int, Tensor] = field(default_factory=dict)
    _values: dict[int, Tensor] = field(default_factory=dict)
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        """Whether the prompts have been read, so that a pass takes one token of each sequence."""
        return self.lengths is not None

    def prompts_read(self, layout: PackedLayout, device: torch.device) -> None:
        """Note the lengths of the prompts, after the pass that read them."""
        self.lengths, self.longest = torch.tensor(layout.lengths, device=device), max(layout.lengths)

    def repeat(self, copies: int) -> None:
        """Go on with `copies` sequences of each prompt, side by side."""
        assert self.lengths is not None
        self.sequences, self.lengths = self.sequences * copies, self.lengths.repeat_interleave(copies)
        for store in (self._keys, self._values, self._inputs, self._states):
            for layer in store:  # one after the other, so that a single layer is held twice
                store[layer] = store[layer].repeat_interleave(copies, dim=0)

    def token_read(self) -> None:
        """Note that every sequence has got one token more."""
        assert self.lengths is not None
        self.lengths, self.longest = self.lengths + 1, self.longest + 1

    def keep_prompts(self, layer: int, key: Tensor, value: Tensor, layout: PackedLayout) -> None:
        """Keep keys and values (T, G, D) of the packed prompts; `layer` is megatron-core's number of the layer."""
        for store, packed in ((self._keys, key), (self._values, value)):
            rows = layout.unpack(packed[None], max(layout.lengths)).transpose(1, 2)  # (S, G, L, D)
            kept = rows.new_zeros(*rows.shape[:2], self.capacity, rows.shape[3])
            kept[:, :, : rows.shape[2]] = rows
            store[layer] = kept

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attention of the next token of each sequence to all before it and to itself, (T, H, D).

        query (T, H, D), key and value (T, G, D): rows behind the first S are padding, and get zeros. `scale`: of the
        products, None: 1 / sqrt(D); `window`: the most keys that are seen, the token's own included, None: all.
        """
        assert self.lengths is not None
        count, position = self.sequences, self.lengths.view(-1, 1, 1, 1)
        keys, values = self._keys[layer], self._values[layer]
        for kept, new in ((keys, key), (values, value)):
            width = (count, kept.shape[1], 1, kept.shape[3])
            kept.scatter_(2, position.expand(width), new[:count].unsqueeze(2).to(kept.dtype))
        seen = self.longest + 1
        tokens = torch.arange(seen, device=key.device)
        mask = tokens <= position  # (S, 1, 1, seen)
        if window is not None:
            mask = mask & (tokens > position - window)
        # The heads that share a key are queries of one head: no key is repeated.
        heads = query[:count].unflatten(1, (keys.shape[1], -1))
        out = F.scaled_dot_product_attention(heads, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale)
        return F.pad(out.flatten(1, 2), (0, 0, 0, 0, 0, len(query) - count))

    def keep_inputs(self, layer: int, inputs: Tensor, taps: int, layout: PackedLayout) -> None:
        """Keep the last taps - 1 inputs (T, C) of each prompt's convolution, zeros before its start."""
        index = last_tokens(layout, taps - 1).to(inputs.device)
        kept = inputs.index_select(0, index.clamp(min=0).flatten()).unflatten(0, index.shape)
        self._inputs[layer] = kept * (index >= 0).unsqueeze(-1).to(kept.dtype)

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor) -> Tensor:
        """silu(causal convolution) (S, C) of the next inputs (S, C) and those kept, by weight (C, K)."""
        window = torch.cat((self._inputs[layer], inputs[:, None]), dim=1)
        self._inputs[layer] = window[:, 1:]
        return F.silu((window.float() * weight.t().float()).sum(1)).to(inputs.dtype)

    def keep_state(self, layer: int, state: Tensor) -> None:
        """Keep the state (S, G, K, V) fp32 of a delta net at the end of each prompt."""
        self._states[layer] = state

    def apply_delta_rule(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """One token of the gated delta rule: query, key (S, G, K) of unit length, value (S, G, V) -> (S, G, V) fp32.

        `zoo.nn.decoder.attention.gated_delta_net.gated_delta_rule` has the formula; decay and beta are (S, G).
        """
        state = self._states[layer] * decay.float().exp()[..., None, None]
        update = (value.float() - (state * key[..., None]).sum(-2)) * beta.float()[..., None]
        state = state + key[..., None] * update.unsqueeze(-2)
        self._states[layer] = state
        return (state * query[..., None]).sum(-2)


def last_tokens(layout: PackedLayout, count: int) -> Tensor:
    """(S, count) int64 places in the packed row of each segment's last real tokens; -1 before its start. On the host."""
    starts = torch.tensor([0, *layout.padded_lengths[:-1]]).cumsum(0)
    inside = torch.tensor(layout.lengths)[:, None] - count + torch.arange(count)
    return torch.where(inside >= 0, starts[:, None] + inside, -1)
