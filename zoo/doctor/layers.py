"""The parts of a recipe's model that are checked: its config and towers without data, and a few real layers.

The doctor is given the whole model on the meta device, for its numbers. On the real device it builds a head and one decoder
layer of each kind, by the model's own class at the sizes that a rank has: so its kernels are those of training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from zoo.config.schema import Recipe
from zoo.nn.decoder.attention.self_attention import SelfAttention, attention_window
from zoo.nn.decoder.config import FullHeads
from zoo.nn.inputs import Stage, Vocabulary
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import is_block
from zoo.registry import get_family

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

MOST_EXPERTS = 32  # enough for a check of more, too: a grouped product does not mix experts


@dataclass(frozen=True)
class TowerHeads:
    """Attention of a tower: a module that calls for it, and its sizes."""

    tower: str
    module: torch.nn.Module  # on the meta device
    heads: int
    width: int
    block: torch.nn.Module | None  # the block around it, with norms and MLP; None where transformers runs that

    @property
    def implementation(self) -> str:
        """The name by which transformers finds the attention function."""
        config: Any = self.module.config
        return str(config._attn_implementation)


@dataclass(frozen=True)
class Subject:
    """A recipe's layers, on the device, from which its kernels are taken."""

    recipe: Recipe
    device: torch.device
    config: TransformerConfig  # as a rank has it
    rotary: Any  # zoo.nn.decoder.attention.rotary.RotaryShape
    model: MultimodalModel  # last stage: layers, final norm, head
    towers: tuple[TowerHeads, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.config.params_dtype

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def layer(self, *, linear: bool = False, sparse: bool = False, windowed: bool = False) -> Any:
        """A decoder layer with linear attention, with experts, or with a window; with none of them, with softmax attention to all."""
        for layer in self.model.decoder.layers:
            short = attention_window(self.config, layer.layer_number) is not None
            if windowed or short:
                fits = windowed and short
            elif linear:
                fits = hasattr(layer.self_attention, "in_proj")
            else:
                fits = hasattr(layer.mlp, "experts") if sparse else isinstance(layer.self_attention, SelfAttention)
            if fits:
                return layer
        return None


def make_subject(recipe: Recipe, whole: MegatronModule, device: torch.device) -> Subject:
    """The subject of a validated recipe; megatron-core's process groups of one rank have to be there.

    Args:
        whole: the recipe's model on the meta device, as a single rank builds it under the torch backend.
        device: where kernels are to run.
    """
    rotary = get_family(recipe.model.family).load("config").from_arch(recipe.model.arch).rotary
    whole = getattr(whole, "module", whole)  # behind Float16Module
    local = _of_a_rank(whole.config, recipe)
    torch.manual_seed(0)
    model = MultimodalModel(
        local,
        vocabulary=Vocabulary(-(-whole.vocabulary.size // recipe.parallel.tp)),
        rotary=rotary,
        backend=recipe.engine.backend,
        stage=Stage(first=False, last=True),
        towers={},
    ).to(device)
    return Subject(recipe, device, local, rotary, model, tuple(_towers(whole)))


def _of_a_rank(config: TransformerConfig, recipe: Recipe) -> TransformerConfig:
    """The decoder's config with the heads, experts and widths that a rank of the recipe has, one layer of each kind."""
    parallel, local = recipe.parallel, copy.copy(config)
    assert config.num_query_groups is not None and config.ffn_hidden_size is not None
    local.num_attention_heads = config.num_attention_heads // parallel.tp
    local.num_query_groups = max(1, config.num_query_groups // parallel.tp)
    local.ffn_hidden_size = config.ffn_hidden_size // parallel.tp
    full: FullHeads | None = getattr(config, "full_heads", None)
    local.full_heads = None if full is None else replace(full, groups=full.groups // parallel.tp)
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    linear = config.linear_attention_freq or [0] * config.num_layers
    windowed = config.window_attn_skip_freq or [0] * config.num_layers
    assert isinstance(sparse, list) and isinstance(linear, list) and isinstance(windowed, list)
    kinds = sorted(set(zip(sparse, linear, windowed, strict=True)))
    local.num_layers, local.mtp_num_layers = len(kinds), None
    if config.num_moe_experts:
        assert config.moe_ffn_hidden_size is not None
        local.num_moe_experts = min(MOST_EXPERTS, config.num_moe_experts // parallel.ep)
        local.moe_router_topk = min(config.moe_router_topk, local.num_moe_experts)
        local.moe_ffn_hidden_size = config.moe_ffn_hidden_size // parallel.etp
        local.moe_layer_freq = [sparse for sparse, *_ in kinds]
    if config.linear_attention_freq:
        shares = parallel.tp * parallel.cp
        assert config.linear_num_key_heads is not None and config.linear_num_value_heads is not None
        local.linear_num_key_heads = config.linear_num_key_heads // shares
        local.linear_num_value_heads = config.linear_num_value_heads // shares
        local.linear_attention_freq = [linear for _, linear, _ in kinds]
    if config.window_attn_skip_freq:
        local.window_attn_skip_freq = [short for *_, short in kinds]
    return local


def _towers(model: MegatronModule) -> Iterator[TowerHeads]:
    """One attention of each tower."""
    for name in model.tower_names():
        modules = list(getattr(model, name).modules())
        block = next((module for module in modules if is_block(module)), None)
        for module in modules:
            heads, width = getattr(module, "num_heads", None), getattr(module, "head_dim", None)
            if isinstance(heads, int) and isinstance(width, int) and hasattr(module, "config"):
                yield TowerHeads(name, module, heads, width, block)
                break
