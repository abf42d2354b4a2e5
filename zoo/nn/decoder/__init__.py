"""Layers of the decoder: attention (a folder of its own), experts, router, multi-token prediction, norms, LoRA."""
