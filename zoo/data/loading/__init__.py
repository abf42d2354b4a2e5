"""Samples into steps: lengths, bins, micro-batches, evaluation, and which rows a checkpoint knew."""
