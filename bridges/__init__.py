"""Mapping tables between zoo's parameters and published checkpoints, one module per family."""
