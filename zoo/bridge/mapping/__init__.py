"""The mapping language: rules, tables, transforms between Hugging Face tensors and zoo tensors; PEFT adapters."""
