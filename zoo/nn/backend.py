"""The backends as mcore `BackendSpecProvider`s, and the decoder layer made from one.

Both keep norms apart from the linears that follow, and both use zoo's experts, so parameters have the same
names and shapes under either and checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from zoo.config.checks.engine import TE_IN_FP32, TE_WIDTHS
from zoo.errors import ConfigError
from zoo.nn.decoder.attention.gated_delta_net import GatedDeltaNet, GatedRMSNorm
from zoo.nn.decoder.attention.self_attention import SelfAttention, VarlenCoreAttention
from zoo.nn.decoder.block import SandwichLayer
from zoo.nn.decoder.config import FullHeads
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.nn.decoder.experts.layer import MixtureOfExperts
from zoo.nn.decoder.experts.router import Router
from zoo.nn.decoder.mlp import DenseMLP, SharedExperts
from zoo.nn.decoder.norm import ResidualRMSNorm, RMSNorm
from zoo.nn.fp8.linear import FP8ColumnLinear, FP8RowLinear
from zoo.nn.kernels.widths import te_attention_takes, te_linears_take


class TorchBackend(BackendSpecProvider):
    """Plain PyTorch: nothing to compile at install. Norms stay apart from the linears that follow."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        if not rms_norm:
            raise ValueError("the decoders of zoo use RMSNorm")
        return ResidualRMSNorm if has_residual else RMSNorm

    def core_attention(self) -> type:
        return VarlenCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type:
        return GroupedExperts

    def activation_func(self) -> None:
        return None


class FP8Backend(TorchBackend):
    """The torch backend with the linears of attention and dense MLPs in FP8, scaled by blocks."""

    def column_parallel_linear(self) -> type:
        return FP8ColumnLinear

    def row_parallel_linear(self) -> type:
        return FP8RowLinear


class TEBackend(TorchBackend):
    """Transformer Engine's linears and attention (FP8, context-parallel ring); norms are the torch backend's."""

    def column_parallel_linear(self) -> type:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        return TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        from megatron.core.extensions.transformer_engine import TERowParallelLinear

        return TERowParallelLinear

    def core_attention(self) -> type:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention


def get_backend(name: str, config: TransformerConfig) -> BackendSpecProvider:
    """`auto`, `te` or `torch`.

    `auto` is torch, which was measured to be as fast and starts without Transformer Engine's import; and te for FP8 with a scale for
    each tensor, which is Transformer Engine's. Products in FP8 that are scaled by blocks are torch's.
    """
    if getattr(config, "fp8_blocks", False):
        return FP8Backend()
    if name == "auto":
        name = "te" if config.fp8 else "torch"
    if name == "te":
        if config.params_dtype == torch.float32:
            raise ConfigError(TE_IN_FP32)
        if not te_linears_take(_linear_widths(config)):
            raise ConfigError(TE_WIDTHS)
        return TEBackend()
    if name == "torch":
        return TorchBackend()
    raise ValueError(f"engine.backend={name!r}: wanted auto, te or torch")


def _linear_widths(config: TransformerConfig) -> Iterator[int]:
    """Inputs and outputs of the decoder's linears on a rank, but for experts'."""
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    tp = config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads // tp, max(1, config.num_query_groups // tp)
    gates = heads if config.attention_output_gate else 0
    yield from (config.hidden_size, heads * config.kv_channels, (heads + gates + 2 * groups) * config.kv_channels)
    full: FullHeads | None = getattr(config, "full_heads", None)
    if full is not None:
        yield from (heads * full.width, (heads + full.groups // tp) * full.width)
    yield config.ffn_hidden_size // tp
    if config.moe_shared_expert_intermediate_size:
        yield config.moe_shared_expert_intermediate_size // tp
    if config.linear_attention_freq:
        assert config.linear_num_key_heads and config.linear_num_value_heads
        assert config.linear_key_head_dim and config.linear_value_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        yield from (values // tp, 2 * (keys + values + config.linear_num_value_heads) // tp)


def add_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """mcore's bias, dropout and residual of decoders that have neither bias nor dropout: its own copies for a dropout of 0."""

    def add(out_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + out_and_bias[0]

    return add


def core_attention(config: TransformerConfig, backend: BackendSpecProvider) -> type:
    """The backend's core attention, or PyTorch's where Transformer Engine does not take heads of this width, or windows.

    A decoder with windows may also have runs of tokens that see one another both ways, which Transformer Engine doesn't know.
    """
    assert config.kv_channels is not None
    taken = te_attention_takes(config.kv_channels) and config.window_size is None
    if isinstance(backend, TEBackend) and not taken:
        return VarlenCoreAttention
    return backend.core_attention()


def self_attention(config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    """Softmax attention, with norms of queries and keys and an output gate where the config has them."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=core_attention(config, backend),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else None,
            k_layernorm=backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else None,
        ),
    )


def linear_attention(backend: BackendSpecProvider) -> ModuleSpec:
    """Gated DeltaNet; its recurrence magnifies rounding, so its linears are not in FP8 scaled by blocks."""
    if isinstance(backend, FP8Backend):
        backend = TorchBackend()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(), out_norm=GatedRMSNorm, out_proj=backend.row_parallel_linear()
        ),
    )


def decoder_layer(
    config: TransformerConfig, backend: BackendSpecProvider, *, experts: bool, linear: bool = False
) -> ModuleSpec:
    """One pre-norm decoder layer: (`linear`) attention, then an MLP or (with `experts`) an MoE layer.

    Where the config says so, there is a norm behind each of the two as well.
    """
    norm = backend.layer_norm(rms_norm=True, has_residual=True)
    attention = linear_attention(backend) if linear else self_attention(config, backend)
    dense = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    mlp = partial(DenseMLP.as_mlp_submodule, submodules=dense)
    if experts:
        shared = partial(SharedExperts, submodules=dense)
        parts = MoESubmodules(experts=backend.grouped_mlp_modules(True), shared_experts=shared, router=Router)
        mlp = partial(MixtureOfExperts, submodules=parts)
    return ModuleSpec(
        module=SandwichLayer if getattr(config, "sandwich_norms", False) else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=add_residual,
        ),
    )
