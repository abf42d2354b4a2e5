"""Layers of the decoder: attention, Gated DeltaNet, experts, router, multi-token prediction, norms, rotary, LoRA."""
