"""CUDA graphs of a stack of layers: what the host does in a layer is done once, and replayed."""
