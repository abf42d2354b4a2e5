"""A recipe's model: built on this rank, described without its data, with LoRA beside its weights."""
