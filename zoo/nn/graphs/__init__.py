"""CUDA graphs of a stack of layers: what the host does in a layer is done once, and replayed."""

from zoo.nn.graphs.layers import LayerGraphs

__all__ = ["LayerGraphs"]
