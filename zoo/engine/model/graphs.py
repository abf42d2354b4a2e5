"""Which stacks of a model have their layers captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.nn.graphs.layers import LayerGraphs
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import is_block


def use_graphs(chunks: Sequence[Any]) -> int:
    """Have the decoders and vision towers of model chunks, under DDP, captured as rows come; returns how many stacks there are."""
    found = 0
    for chunk in (part for one in chunks for part in one.modules() if isinstance(part, MultimodalModel)):
        decoder = chunk.decoder
        if not any(
            hasattr(layer.mlp, "router") for layer in decoder.layers
        ):  # whose shapes the router decides
            deepstack = max(chunk.deepstack_layers.values(), default=0)
            decoder.graphs = LayerGraphs(decoder.layers, range(deepstack))
            found += 1
        for name in chunk.tower_names():
            tower = getattr(chunk, name, None)
            blocks = getattr(tower, "blocks", None)
            if blocks is not None and all(is_block(block) for block in blocks):
                graphs = LayerGraphs(blocks, getattr(tower, "deepstack_visual_indexes", ()))
                for place, block in enumerate(blocks):
                    block.graphs, block.place = graphs, place
                found += 1
    return found
