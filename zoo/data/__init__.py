"""Rows to samples to token-budget bins to micro-batches.

`rows` reads and checks JSONL, `media` decodes, `processor` encodes a row through a Hugging Face processor, `sample` holds
samples and micro-batches, `source` caches samples and settles bad rows, `lengths` knows what rows take, `loader` streams the
steps of a run, `evaluation` goes through a set once.
Import from the modules: this package stays light, so that the command line can answer at once.
"""
