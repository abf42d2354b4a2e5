"""Rows to samples to token-budget bins to micro-batches.

`tables` and `streams` find rows, `formats` and `adapters` know their forms, `rows` checks them, `mixture` orders them; `media`
decodes, `workers` do so in processes of their own, `labels` says what is learnt, `processor` encodes a row through a Hugging Face processor, `sample` holds
samples and micro-batches, `source` caches samples and settles bad rows, `lengths` knows what rows take, `loader` streams the
steps of a run, `evaluation` goes through a set once.
Import from the modules: this package stays light, so that the command line can answer at once.
"""
