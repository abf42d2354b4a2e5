"""Benches of training: steps of zoo and of transformers, in the same setting, with the receipts of both."""
