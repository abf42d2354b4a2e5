"""mcore's TransformerConfig from a Hugging Face text config and a recipe."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from zoo.config.derived import stage_layers
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.nn.decoder.mlp import ACTIVATIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

type Settings = dict[str, Any]  # keywords of megatron-core's TransformerConfig
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# By `engine.recompute`. Selective: MLP and experts, which keep most of what a layer keeps where attention stores no
# scores. megatron-core's `layernorm` would go with them, but without Transformer Engine it ends in a NameError.
RECOMPUTE: dict[str, Settings] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

# Transformer Engine's, scaled by the largest value of each tensor at hand: nothing is remembered from one call to the next.
FP8: Settings = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


@dataclass(frozen=True)
class FullHeads:
    """Heads of layers that see all tokens, where layers with a window have others. Values are the keys before norm and rotation."""

    width: int  # channels of a head
    groups: int  # key heads


def full_heads(text: PretrainedConfig) -> FullHeads | None:
    """Heads of layers that see all tokens; None: those of all layers. A family's config says so of its `text`."""
    return getattr(text, "full_heads", None)


def head_width(text: PretrainedConfig) -> int:
    """Channels of a head; of layers with a window, where the others have `full_heads`."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def layer_config(config: TransformerConfig, layer_number: int) -> TransformerConfig:
    """The decoder's config with the heads of a layer (counted from 1)."""
    full: FullHeads | None = getattr(config, "full_heads", None)
    if full is None or is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return config
    layer_copy = copy.copy(config)
    layer_copy.kv_channels, layer_copy.num_query_groups = full.width, full.groups
    layer_copy.values_are_keys = True
    return layer_copy


def transformer_config(
    text: PretrainedConfig,
    recipe: Recipe,
    *,
    qk_norm: bool = False,
    output_gate: bool = False,
    zero_centered: bool = False,
    qkv_bias: bool = False,
    sandwich_norms: bool = False,
    value_norm: bool = False,
    unscaled: bool = False,
    layer_scale: bool = False,
    two_way_in_windows: bool = False,
    sigmoid_routing: bool = False,
    plain_shared_expert: bool = False,
    mtp_layers: int = 0,
) -> TransformerConfig:
    """The decoder of a Hugging Face text config (`hidden_size`, `num_hidden_layers`, ...) under a recipe.

    Sizes come from `text`, everything about execution from `recipe`, which has been validated. What follows
    is what a family has and its configs don't say: `qk_norm`, RMSNorm of queries and keys per head; `output_gate`,
    a sigmoid gate on what attention gives; `zero_centered`, norms that multiply by 1 + weight; `qkv_bias`, a bias to
    queries, keys and values; `sandwich_norms`, norms behind attention and MLP too; `value_norm`, RMSNorm of values per head, without
    a weight; `unscaled`, products of queries and keys as they are; `layer_scale`, a number that multiplies what a layer gives;
    `two_way_in_windows`, two-way runs in layers with a window alone; `sigmoid_routing`, experts chosen by sigmoid scores and a bias that stays as it is;
    `plain_shared_expert`, one without a gate; `mtp_layers`, layers that predict further tokens.

    A config's `attention_bias` is of queries, keys, values and of what attention gives; of the first three alone with `qkv_bias`.

    What a config asks and this decoder doesn't have, `zoo.nn.config_checks` has refused; UserError for a sample that could grow
    longer than a dynamic rotary embedding is computed for.
    """
    _refuse_long_samples(text, recipe)
    parallel, precision = recipe.parallel, recipe.engine.precision or "fp32"
    dtype, scalar = DTYPES[precision], getattr(text, "query_pre_attn_scalar", None)  # None: 1 / sqrt of a head's width
    biased = bool(getattr(text, "attention_bias", False))
    config = TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=head_width(text),
        ffn_hidden_size=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,  # all layers sparse
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        activation_func=ACTIVATIONS[activation(text)],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=qkv_bias or biased,
        qk_layernorm=qk_norm,
        attention_output_gate=output_gate,
        layernorm_zero_centered_gamma=zero_centered,
        mtp_num_layers=mtp_layers or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        init_method_std=text.initializer_range,
        **RECOMPUTE[recipe.engine.recompute],
        **(FP8 if recipe.engine.fp8 and recipe.engine.fp8_recipe == "tensorwise" else {}),
        **_expert_settings(text, recipe, sigmoid_routing, plain_shared_expert),
        **_linear_attention_settings(text),
        **_window_settings(text),
        softmax_scale=1.0 if unscaled else None if scalar is None else float(scalar) ** -0.5,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        pipeline_model_parallel_layout=_stages(recipe, text.num_hidden_layers, mtp_layers),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=bool(parallel.sp),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        hetereogenous_dist_checkpoint=full_heads(text) is not None,  # layers don't stack to one tensor
        variable_seq_lengths=True,  # packed rows differ in length
        **_dispatcher_settings(recipe),
        deallocate_pipeline_outputs=True,
        # Interleaved, both neighbours of a rank are the same one where there are two stages: a batch of sends and
        # receives would mix up the two directions, so megatron-core wants them one by one.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    config.inputs_on_host = recipe.engine.offload_activations  # those of recomputed layers
    config.delta_rule = recipe.engine.delta_rule  # for GatedDeltaNet alone
    fp8 = recipe.engine.fp8
    config.fp8_blocks = fp8 and recipe.engine.fp8_recipe == "blockwise"  # these two for zoo.nn.backend
    config.sandwich_norms, config.output_bias = sandwich_norms, biased and not qkv_bias
    config.value_norm, config.layer_scale = value_norm, layer_scale
    config.full_heads, config.two_way_in_windows = full_heads(text), two_way_in_windows
    return config


def _dispatcher_settings(recipe: Recipe) -> Settings:
    """megatron-core's token dispatcher, also of dense models, for which it is checked as well."""
    parallel = recipe.parallel
    if parallel.dispatch == "alltoall" or parallel.ep * parallel.etp == 1:
        return {"moe_token_dispatcher_type": "alltoall"}  # takes rows that differ in length
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": parallel.dispatch,
        "moe_hybridep_pad_uneven_dispatch_inputs": True,
    }


def _stages(recipe: Recipe, layers: int, mtp_layers: int) -> list[list[str]] | None:
    """What stands on each pipeline stage, as megatron-core names it, where stages differ; None where they don't."""
    counts = stage_layers(recipe, layers)
    if len(set(counts)) == 1:
        return None
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * mtp_layers + ["loss"]
    return stages


def activation(text: PretrainedConfig) -> str:
    """transformers' name of the MLP's activation function, which Gemma has under a key of its own."""
    return str(getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", "silu"))


def windowed_layers(text: PretrainedConfig) -> list[bool]:
    """Whether each layer's attention sees a window alone: as `layer_types` says, or all of them where a config has no such key."""
    if kinds := getattr(text, "layer_types", None):
        return [kind == "sliding_attention" for kind in kinds]
    windowed = bool(getattr(text, "sliding_window", None)) and bool(getattr(text, "use_sliding_window", True))
    return [windowed] * text.num_hidden_layers


def _window_settings(text: PretrainedConfig) -> Settings:
    """The window of sliding layers, and which these are; empty for a decoder without any."""
    windowed = windowed_layers(text)
    if not any(windowed):
        return {}
    return {"window_size": (text.sliding_window - 1, 0), "window_attn_skip_freq": list(map(int, windowed))}


def normalised(text: PretrainedConfig) -> bool:
    """Whether the weights of a token's experts sum to one: always, where transformers' config has no key for it."""
    return bool(getattr(text, "norm_topk_prob", True))


def _refuse_long_samples(text: PretrainedConfig, recipe: Recipe) -> None:
    """UserError where a sample, which is no longer than the budget, could outgrow what this decoder computes as transformers does."""
    budget, longest = recipe.packing.budget, getattr(text, "max_position_embeddings", 0)
    if getattr(text, "rope_parameters", {}).get("rope_type") == "dynamic" and longest < budget:
        raise UserError(
            f"the decoder's rope_parameters.rope_type is 'dynamic', max_position_embeddings {longest} and packing.budget "
            f"{budget}: longer samples would be rotated otherwise, which is not built; set packing.budget={longest} or less"
        )


def _linear_attention_settings(text: PretrainedConfig) -> Settings:
    """Settings of the Gated DeltaNet layers; empty for a decoder without any."""
    kinds = list(getattr(text, "layer_types", None) or [])
    if "linear_attention" not in kinds:
        return {}
    return {
        "linear_attention_freq": [int(kind == "linear_attention") for kind in kinds],
        "linear_conv_kernel_dim": text.linear_conv_kernel_dim,
        "linear_key_head_dim": text.linear_key_head_dim,
        "linear_value_head_dim": text.linear_value_head_dim,
        "linear_num_key_heads": text.linear_num_key_heads,
        "linear_num_value_heads": text.linear_num_value_heads,
    }


def limits_groups(text: PretrainedConfig) -> bool:
    """Whether a token's experts are all of some groups, of fewer than there are."""
    return getattr(text, "topk_group", 1) < getattr(text, "n_group", 1)


def _expert_settings(text: PretrainedConfig, recipe: Recipe, sigmoid: bool, plain_shared: bool) -> Settings:
    """Settings of the MoE layers; empty for a dense decoder."""
    experts = getattr(text, "num_experts", None)
    if not experts:
        return {}
    shared = getattr(text, "shared_expert_intermediate_size", 0) or None
    dense_layers = set(getattr(text, "mlp_only_layers", None) or [])
    every = getattr(text, "decoder_sparse_step", 1)
    sigmoid_settings: Settings = {}
    if (
        sigmoid
    ):  # DeepSeek-V3, arXiv 2412.19437, 2.1.2; its bias chooses and does not weigh, and no update moves it here
        sigmoid_settings = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_num_groups": text.n_group if limits_groups(text) else None,
            "moe_router_group_topk": text.topk_group if limits_groups(text) else None,
            "moe_router_topk_scaling_factor": text.routed_scaling_factor,
        }
    is_moe = [int(i not in dense_layers and (i + 1) % every == 0) for i in range(text.num_hidden_layers)]
    return {
        "num_moe_experts": experts,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_pre_softmax": not normalised(text) and not sigmoid,
        **sigmoid_settings,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None and not plain_shared,
        "moe_layer_freq": is_moe,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": recipe.train.aux_loss,
        "moe_z_loss_coeff": recipe.train.z_loss or None,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }
