"""What of a recipe's model the doctor looks at: its config and towers without data, and a few real layers of it.

The whole model is built on the meta device, for its numbers. On the real device stands a head with one decoder layer of
each kind, built by the model's own class at the sizes that a rank has: so kernels are taken from where training gets them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from zoo.config.schema import Recipe
from zoo.engine.distributed.world import World, on_one_rank
from zoo.engine.model import build
from zoo.engine.model.meta_model import on_meta
from zoo.nn.inputs import Stage
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import is_block
from zoo.registry import get_family

MOST_EXPERTS = 32  # that stand for any number of them: a grouped product does not mix experts


@dataclass(frozen=True)
class TowerHeads:
    """Attention of a tower: a module that calls for it, and its sizes."""

    tower: str
    module: torch.nn.Module  # on the meta device
    heads: int
    width: int
    block: torch.nn.Module | None  # around it, with norms and MLP; None where zoo leaves that to transformers

    @property
    def implementation(self) -> str:
        """The name by which transformers finds the attention function."""
        config: Any = self.module.config
        return str(config._attn_implementation)


@dataclass(frozen=True)
class Subject:
    """A recipe's kernels: `layers` by (sparse, linear), on the device."""

    recipe: Recipe
    device: torch.device
    config: TransformerConfig  # as a rank has it
    rotary: Any  # zoo.nn.inputs.RotaryShape
    model: MultimodalModel  # last stage: layers, final norm, head
    towers: tuple[TowerHeads, ...]

    @property
    def dtype(self) -> torch.dtype:
        """What activations are in."""
        return self.config.params_dtype

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def layer(self, *, linear: bool = False, sparse: bool = False) -> Any:
        """A decoder layer with linear attention, with experts or, with neither, with softmax attention; or None."""
        for layer in self.model.decoder.layers:
            if linear:
                found = hasattr(layer.self_attention, "in_proj")
            else:
                found = (
                    hasattr(layer.mlp, "experts") if sparse else hasattr(layer.self_attention, "linear_qkv")
                )
            if found:
                return layer
        return None


def subject(recipe: Recipe, here: World) -> Subject:
    """The subject of a validated recipe, in a world of one rank."""
    family = get_family(recipe.model.family)
    config = family.load("config").from_arch(recipe.model.arch)
    plain = on_one_rank(recipe).replace({"engine.backend": "torch"})  # the same shapes, and minds no meta
    with on_meta(here) as nowhere:
        whole = build.build_model(build.Assembly(family, config, None, None), plain, nowhere)[0]
    whole = getattr(whole, "module", whole)  # behind Float16Module
    local = _of_a_rank(whole.config, recipe)
    torch.manual_seed(0)
    model = MultimodalModel(
        local,
        vocab_size=whole.vocab_size // recipe.parallel.tp,
        rotary=config.rotary,
        backend=recipe.engine.backend,
        stage=Stage(first=False, last=True),
        towers={},
    ).to(here.device)
    return Subject(recipe, here.device, local, config.rotary, model, tuple(_towers(whole)))


def _of_a_rank(config: TransformerConfig, recipe: Recipe) -> TransformerConfig:
    """The decoder's config with the heads, experts and widths that a rank of the recipe has, one layer of each kind."""
    parallel, local = recipe.parallel, copy.copy(config)
    assert config.num_query_groups is not None and config.ffn_hidden_size is not None
    local.num_attention_heads = config.num_attention_heads // parallel.tp
    local.num_query_groups = max(1, config.num_query_groups // parallel.tp)
    local.ffn_hidden_size = config.ffn_hidden_size // parallel.tp
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    linear = config.linear_attention_freq or [0] * config.num_layers
    assert isinstance(sparse, list) and isinstance(linear, list)
    kinds = sorted(set(zip(sparse, linear, strict=True)))
    local.num_layers, local.mtp_num_layers = len(kinds), None
    if config.num_moe_experts:
        assert config.moe_ffn_hidden_size is not None
        local.num_moe_experts = min(MOST_EXPERTS, config.num_moe_experts // parallel.ep)
        local.moe_router_topk = min(config.moe_router_topk, local.num_moe_experts)
        local.moe_ffn_hidden_size = config.moe_ffn_hidden_size // parallel.etp
        local.moe_layer_freq = [sparse for sparse, _ in kinds]
    if config.linear_attention_freq:
        shares = parallel.tp * parallel.cp
        assert config.linear_num_key_heads is not None and config.linear_num_value_heads is not None
        local.linear_num_key_heads = config.linear_num_key_heads // shares
        local.linear_num_value_heads = config.linear_num_value_heads // shares
        local.linear_attention_freq = [linear for _, linear in kinds]
    return local


def _towers(model: Any) -> Iterator[TowerHeads]:
    """One attention of each tower."""
    for name in model.tower_names():
        modules = list(getattr(model, name).modules())
        block = next((module for module in modules if is_block(module)), None)
        for module in modules:
            heads = getattr(module, "num_heads", None)
            width = getattr(module, "head_dim", None)
            if isinstance(heads, int) and isinstance(width, int) and hasattr(module, "config"):
                yield TowerHeads(name, module, heads, width, block)
                break
