"""The updates of weights inside Megatron-Core's distributed optimizer: AdamW, and Muon beside it."""
