"""Training: the trainer, its run and steps, optimizer, data, evaluation, metrics, bad steps, check of kernels, resuming."""
