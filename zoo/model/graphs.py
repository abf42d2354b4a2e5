"""Which stacks of a model have their layers captured as CUDA graphs, and the end of these."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from zoo.nn.decoder.attention.gated_delta_net import GatedDeltaNet, delta_rule_kernel
from zoo.nn.decoder.attention.varlen import has_flash
from zoo.nn.graphs.layers import LayerGraphs
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import is_block


def use_graphs(chunks: Sequence[Any]) -> int:
    """Have the decoders and vision towers of model chunks, under DDP, captured as rows come; returns how many stacks there are.

    Warns of a stack on a GPU that has no kernel for packed rows: what stands in for it goes by a row's lengths, which a graph can't.
    """
    found = 0
    for chunk in (part for one in chunks for part in one.modules() if isinstance(part, MultimodalModel)):
        decoder = chunk.decoder
        dense = not any(hasattr(layer.mlp, "router") for layer in decoder.layers)  # a router decides shapes
        if dense and _captured("decoder", _missing_in_decoder(decoder)):
            deepstack = max(chunk.deepstack_layers.values(), default=0)
            decoder.graphs = LayerGraphs(decoder.layers, range(deepstack))
            found += 1
        for name in chunk.tower_names():
            tower = getattr(chunk, name, None)
            blocks = getattr(tower, "blocks", None)
            if blocks is not None and all(map(is_block, blocks)):
                if not _captured(name, _missing_in_tower(tower)):
                    continue
                _capture_tower(tower)
                found += 1
    return found


def _capture_tower(tower: Any) -> None:
    windows = _windows(tower)
    changes = {place - 1 for place in range(1, len(windows)) if windows[place] != windows[place - 1]}
    first = windows.index(None) if None in windows else None
    graphs = LayerGraphs(tower.blocks, {*getattr(tower, "deepstack_visual_indexes", ()), *changes})
    for place, (block, window) in enumerate(zip(tower.blocks, windows, strict=True)):
        block.graphs, block.place, block.window = graphs, place, window
        block.enters_frames = place == first


def _windows(tower: Any) -> list[int | None]:
    """The most patches of a window that a block attends within; None: it attends within frames."""
    places = range(len(tower.blocks))
    full = getattr(tower, "fullatt_block_indexes", places)
    if all(place in full for place in places):
        return [None] * len(places)
    merge = tower.spatial_merge_size
    side = tower.window_size // merge // tower.patch_size * merge
    return [None if place in full else side**2 for place in places]


def release_graphs(chunks: Sequence[Any]) -> None:
    """Give up the graphs of model chunks. To be called before process groups end: see `Recorder.release`."""
    found = (getattr(module, "graphs", None) for chunk in chunks for module in chunk.modules())
    for stack in {one for one in found if isinstance(one, LayerGraphs)}:
        stack.release()


def _captured(name: str, missing: str | None) -> bool:
    if missing is not None:
        warnings.warn(f"engine.cuda_graphs: layers of the {name} run without: {missing}", stacklevel=3)
    return missing is None


def _missing_in_decoder(decoder: Any) -> str | None:
    """The kernel for packed rows that a decoder on a GPU has to do without."""
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


def _missing_in_tower(tower: Any) -> str | None:
    """Why a tower's blocks can't be captured: the kernel that they have to do without on a GPU, or windows that come late."""
    windows, block = _windows(tower), tower.blocks[0]
    if any(windows) and windows[0] is None:
        return "its first layer attends within frames, and how many windows come behind it can't be told by these"
    weight = block.norm1.weight.detach().to(_compute_dtype(block.attn))
    return _missing_attention(weight, len(weight) // block.attn.num_heads) if weight.is_cuda else None


def _compute_dtype(attention: Any) -> torch.dtype:
    """The dtype that a tower's attention multiplies in: that of its matrices, which read as narrower than they may be held."""
    linear = next(module for module in attention.modules() if isinstance(module, torch.nn.Linear))
    return linear.weight.dtype


def _missing_attention(weight: Any, head: int) -> str | None:
    takes = has_flash(weight.new_empty(0, head))
    return None if takes else f"no attention kernel for packed rows takes heads of {head} in {weight.dtype}"
