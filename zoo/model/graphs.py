"""Which stacks of a model have their layers captured as CUDA graphs, and the end of these."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zoo.nn.decoder.attention.gated_delta_net import GatedDeltaNet, delta_rule_kernel
from zoo.nn.decoder.attention.varlen import has_flash
from zoo.nn.graphs.layers import LayerGraphs
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import is_block

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    type Module = MegatronModule  # a decoder or tower, whose attributes mypy does not know


def use_graphs(chunks: Sequence[MegatronModule]) -> int:
    """Have the decoders and vision towers of model chunks, under DDP, captured as rows come; returns the number of stacks.

    Warns of a stack on a GPU that has no kernel for packed rows: the loop in its place depends on a row's lengths, which a
    graph can't.
    """
    stacks = 0
    for chunk in (part for outer in chunks for part in outer.modules() if isinstance(part, MultimodalModel)):
        decoder = chunk.decoder
        dense = not any(hasattr(layer.mlp, "router") for layer in decoder.layers)  # a router decides shapes
        if dense and _captured("decoder", _missing_in_decoder(decoder)):
            deepstack = max(chunk.deepstack_layers.values(), default=0)
            decoder.graphs = LayerGraphs(decoder.layers, range(deepstack))
            stacks += 1
        for name in chunk.tower_names():
            tower = getattr(chunk, name, None)
            blocks = getattr(tower, "blocks", None)
            if blocks is not None and all(map(is_block, blocks)):
                if not _captured(name, _missing_in_tower(tower)):
                    continue
                windows = _windows(tower)
                changes = {index - 1 for index in range(1, len(windows)) if windows[index] != windows[index - 1]}
                graphs = LayerGraphs(blocks, {*getattr(tower, "deepstack_visual_indexes", ()), *changes})
                for index, (block, window) in enumerate(zip(blocks, windows, strict=True)):
                    block.graphs, block.number, block.window = graphs, index, window
                    block.enters_frames = None in windows and index == windows.index(None)
                stacks += 1
    return stacks


def _windows(tower: Module) -> list[int | None]:
    """The most patches of a window that a block attends within; None: it attends within frames."""
    indexes = range(len(tower.blocks))
    full = getattr(tower, "fullatt_block_indexes", indexes)
    if all(index in full for index in indexes):
        return [None] * len(indexes)
    merge = tower.spatial_merge_size
    side = tower.window_size // merge // tower.patch_size * merge
    return [None if index in full else side**2 for index in indexes]


def _captured(name: str, missing: str | None) -> bool:
    if missing is not None:
        warnings.warn(f"engine.cuda_graphs: layers of the {name} run without: {missing}", stacklevel=3)
    return missing is None


def _missing_in_decoder(decoder: Module) -> str | None:
    """The kernel for packed rows that a decoder on a GPU lacks; None: it has all."""
    config, weight = decoder.config, next(decoder.parameters()).detach().to(decoder.config.params_dtype)
    if not weight.is_cuda:
        return None
    mixers = [layer.self_attention for layer in decoder.layers]
    if any(isinstance(mixer, GatedDeltaNet) for mixer in mixers):
        value = weight.new_empty(0, config.linear_value_head_dim)
        if delta_rule_kernel(value, config.delta_rule, config.linear_key_head_dim) != "fla":
            return "its delta rule is plain PyTorch's (flash-linear-attention is missing, or does not take its widths)"
    heads = {m.hidden_size_per_attention_head for m in mixers if not isinstance(m, GatedDeltaNet)}
    return next(filter(None, (_missing_attention(weight, head) for head in sorted(heads))), None)


def _missing_in_tower(tower: Module) -> str | None:
    """Why a tower's blocks can't be captured: a kernel that they lack on a GPU, or windows after the first layer; None: they can."""
    windows, block = _windows(tower), tower.blocks[0]
    if any(windows) and windows[0] is None:
        return "its first layer attends within frames, and how many windows come behind it can't be told by these"
    # Attention multiplies in the dtype of its matrices, which read as narrower than they may be held.
    linear = next(module for module in block.attn.modules() if isinstance(module, torch.nn.Linear))
    weight = block.norm1.weight.detach().to(linear.weight.dtype)
    return _missing_attention(weight, len(weight) // block.attn.num_heads) if weight.is_cuda else None


def _missing_attention(weight: torch.Tensor, head: int) -> str | None:
    supported = has_flash(weight.new_empty(0, head))
    return None if supported else f"no attention kernel for packed rows takes heads of {head} in {weight.dtype}"
