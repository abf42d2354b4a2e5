"""Rows to samples to token-budget bins to micro-batches.

`rows` reads and checks JSONL, `media` decodes, `processor` encodes a row through a Hugging Face processor, `sample` holds
samples and micro-batches, `source` caches samples and settles bad rows, `loader` streams the steps of a run.
Import from the modules: this package stays light, so that the command line can answer at once.
"""
