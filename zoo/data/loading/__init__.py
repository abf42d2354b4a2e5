"""Samples into steps: lengths, bins, micro-batches, and evaluation."""
