"""Passes before a step: other models' log-probabilities, and vectors of all micro-batches."""
