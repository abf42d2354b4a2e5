"""The Megatron-Core host: process groups, model and optimizer, schedules, checkpoints, the training loop."""
