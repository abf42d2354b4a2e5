"""A recipe's model: built on a rank or on the meta device, and its LoRA adapters."""
