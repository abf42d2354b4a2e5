"""Towers of transformers on zoo's attention: one call for the whole flat batch, as an attention function of theirs.

transformers' vision and audio encoders run all images or clips as one row with `cu_seqlens`, but split it in
Python for every implementation whose name lacks "flash". `use_varlen_attention` gives them this one: PyTorch's
varlen flash attention on a GPU in half precision, else one masked call over the segments side by side.

On a GPU in half precision, queries, keys and values are one product and are turned in one pass, sums and norms of a block
are one kernel, so are the gradients of GELU and of the bias before it, an MLP with a gate is two products of widths that a
GPU takes, and a convolution whose input is one patch is the matrix product that it amounts to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.activations import GELUTanh, SiLUActivation

from zoo.errors import UserError
from zoo.nn.decoder.attention.varlen import has_flash, has_flash4, sdpa, varlen_attention
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.graphs.layers import Captured, LayerCall, LayerGraphs, captured_of
from zoo.nn.graphs.row import StaticRow, pieces_behind
from zoo.nn.kernels import fused
from zoo.nn.kernels.widths import flash4_width, flash_takes
from zoo.nn.towers.linears import MULTIPLE, joinable, joined
from zoo.packing import PackedLayout

SILU = torch.nn.SiLU, SiLUActivation
NAME = "zoo_varlen_flash"  # "flash" makes the encoders pass cu_seqlens (is_flash_attention_requested)


def use_varlen_attention(tower: torch.nn.Module) -> torch.nn.Module:
    """Make every attention of `tower`, a transformers encoder, use `tower_attention`."""
    AttentionInterface.register(NAME, tower_attention)
    for module in tower.modules():
        config = getattr(module, "config", None)
        if getattr(config, "attention_dropout", 0):
            raise UserError(
                f"config.json: attention_dropout is {config.attention_dropout} in a tower, whose attention has no dropout "  # type: ignore[union-attr]
                "here; set it to 0"
            )
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
        if hasattr(module, "num_heads") and (_is_of(module, "qkv", "proj") or _is_of(module, "q", "k", "v", "proj")):
            _give(module, _attend)
        if isinstance(module, torch.nn.Conv3d):
            _give(module, _project_patches)
        if isinstance(module, torch.nn.LayerNorm):
            _give(module, _layer_norm)
        if _is_rms_norm(module):
            _give(module, _rms_norm)
        if is_block(module):
            _give(module, _block)
        if isinstance(getattr(module, "act_fn", None), GELUTanh) and _is_of(module, "linear_fc1", "linear_fc2"):
            _give(module, _feed_forward)
        if isinstance(getattr(module, "act_fn", None), SILU) and _is_of(module, "gate_proj", "up_proj", "down_proj"):
            _give(module, _gated_feed_forward)
    return tower


def is_block(module: torch.nn.Module) -> bool:
    """Whether a module is a vision block as in Qwen's towers: attention and MLP, each behind a LayerNorm or an RMSNorm."""
    norms = [getattr(module, norm, None) for norm in ("norm1", "norm2")]
    return _is_of(module, "norm1", "attn", "norm2", "mlp") and all(
        isinstance(norm, torch.nn.LayerNorm) or _is_rms_norm(norm) for norm in norms
    )


def _is_rms_norm(module: Any) -> bool:
    """Whether a module is transformers' weight * x / rms(x), of which each model has a class of its own."""
    return (
        type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight") and hasattr(module, "variance_epsilon")
    )


def _is_of(module: torch.nn.Module, *parts: str) -> bool:
    """Whether a module has these parts, an activation and nothing else: with more it computes more, as a merger with an MLP."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return not own and {name for name, _ in module.named_children()} - {"act_fn"} == set(parts)


def _give(module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = MethodType(forward, module)


def _attend(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | None = None,
    **further: Any,
) -> Tensor:
    """The attention module's own forward, hidden_states (N, C), with queries, keys and values turned in one pass."""
    has_kernel = flash_takes(hidden_states.shape[-1] // self.num_heads)
    if not has_kernel or not fused(hidden_states) or position_embeddings is None or max_seqlen is None:
        return type(self).forward(
            self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, max_seqlen=max_seqlen, **further
        )
    from zoo.nn.kernels.rotary import cut_heads, rotate_qkv

    qkv = _queries_keys_values(self, hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
    head = qkv.shape[-1]
    padded = flash4_width(head) if has_flash4(qkv) else None  # here: it would take another pass over all three
    cos, sin = (angles.float() for angles in position_embeddings)
    query, key, value = rotate_qkv(qkv, cos, sin, padded)
    attended = varlen_attention(query, key, value, cu_seqlens, max_seqlen, self.scaling, causal=False)
    if attended.shape[-1] > head:
        attended = cut_heads(attended, head)
    return self.proj(attended.flatten(1))


def _queries_keys_values(attention: Any, hidden_states: Tensor) -> Tensor:
    """The three projections of hidden states (N, C), side by side: (N, 3 C)."""
    if hasattr(attention, "qkv"):
        return attention.qkv(hidden_states)
    parts = attention.q, attention.k, attention.v
    if joinable(*parts) and not hidden_states.shape[-1] % MULTIPLE:
        return joined(hidden_states, *parts)
    return torch.cat([part(hidden_states) for part in parts], dim=-1)


def _block(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **further: Any,
) -> Tensor:
    """The block's own forward, hidden_states (N, C), with sums and norms in one pass."""
    if not fused(hidden_states):
        return type(self).forward(self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, **further)
    graphs = _graphs(self, hidden_states, cu_seqlens, position_embeddings)
    if graphs is None:
        return _run_block(self, hidden_states, cu_seqlens, position_embeddings, **further)
    return graphs.replay(self.number, hidden_states)


def _graphs(
    block: Any, hidden_states: Tensor, cu_seqlens: Tensor, angles: tuple[Tensor, Tensor] | None
) -> Captured | None:
    """The CUDA graphs that a row of patches runs in: chosen at the first block, and carried on by what a block gives."""
    stack: LayerGraphs | None = getattr(block, "graphs", None)
    if stack is None or angles is None or not block.training:
        return None
    if block.number > 0:
        captured = captured_of(hidden_states)
        if captured is not None and block.enters_frames:
            captured.row.fill_outer_offsets(cu_seqlens)
        return captured
    window = block.window

    def fill(row: StaticRow) -> None:
        row.fill_offsets(cu_seqlens, window)
        row.fill_tokens({"cos": angles[0], "sin": angles[1]})

    def runner(row: StaticRow) -> LayerCall:
        x = row.by_token

        def run(block: Any, states: Tensor) -> Tensor:
            offsets = row.offsets if block.window == window else row.outer_offsets
            longest = block.window or row.tokens
            return _run_block(block, states, offsets, (x["cos"], x["sin"]), max_seqlen=longest)

        return run

    segments = len(cu_seqlens) - 1
    if window is not None:
        segments += pieces_behind(len(hidden_states), window)
    return stack.begin(hidden_states, segments, fill, runner)


def _run_block(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    **further: Any,
) -> Tensor:
    normed, hidden = _add_norm(self.norm1, hidden_states, None)
    attended = self.attn(normed, cu_seqlens, position_embeddings=position_embeddings, **further)
    normed, hidden = _add_norm(self.norm2, hidden, attended)
    return hidden + self.mlp(normed)


def _add_norm(norm: Any, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of the sum of both (N, C), and the sum."""
    if isinstance(norm, torch.nn.LayerNorm):
        from zoo.nn.kernels.layer_norm import add_layer_norm

        return add_layer_norm(hidden, added, norm.weight, norm.bias, norm.eps)
    from zoo.nn.kernels.norm import rms_norm_residual

    return rms_norm_residual(hidden if added is None else hidden + added, norm.weight, norm.variance_epsilon)


def _feed_forward(self: Any, hidden_state: Tensor) -> Tensor:
    """The MLP's own forward, hidden_state (N, C), with the gradients of GELU and of the bias before it in one pass."""
    first = self.linear_fc1
    if not fused(hidden_state) or first._forward_hooks:  # an adapter's, for one
        return type(self).forward(self, hidden_state)
    from zoo.nn.kernels.gelu import linear_gelu

    return self.linear_fc2(linear_gelu(hidden_state, first.weight, first.bias, tanh=True))


def _gated_feed_forward(self: Any, hidden_state: Tensor) -> Tensor:
    """The MLP's own forward, hidden_state (N, C), with the gate in the kernel of the activation."""
    x, linears = hidden_state, (self.gate_proj, self.up_proj, self.down_proj)
    if not fused(x) or x.ndim != 2 or x.shape[1] % MULTIPLE or not joinable(*linears):
        return type(self).forward(self, hidden_state)
    from zoo.nn.kernels.swiglu import swiglu

    return joined(swiglu(joined(x, self.gate_proj, self.up_proj)), self.down_proj)


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    """The LayerNorm's own forward, x (..., C)."""
    if not fused(x) or self.bias is None:
        return type(self).forward(self, x)
    from zoo.nn.kernels.layer_norm import layer_norm

    return layer_norm(x, self.weight, self.bias, self.eps)


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    """The RMSNorm's own forward, x (..., C)."""
    if not fused(x):
        return type(self).forward(self, x)
    from zoo.nn.kernels.norm import rms_norm

    return rms_norm(x, self.weight, self.variance_epsilon)


def _project_patches(self: Any, x: Tensor) -> Tensor:
    """The convolution's own forward, x (N, C, t, h, w); of patches as large as its kernel it is a matrix product."""
    if not fused(x) or tuple(x.shape[2:]) != tuple(self.kernel_size):
        return type(self).forward(self, x)
    return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


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
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention within each segment: query, key, value (1, H, N, D) -> (1, N, H, D)."""
    same = {"cu_seq_lens_k": cu_seq_lens_q, "max_length_k": max_length_q}  # each segment against itself
    refuse_unused(
        NAME, {n: x for n, x in unused.items() if x is not same.get(n, NAME)} | {"attention_mask": attention_mask}
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H, D)
    if has_flash(q):
        longest = int(max_length_q) if max_length_q is not None else int(cu_seq_lens_q.diff().max())
        q, k, v = (x.contiguous() for x in (q, k, v))
        return varlen_attention(q, k, v, cu_seq_lens_q, longest, scaling, causal=is_causal)[None], None
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
