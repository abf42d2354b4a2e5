"""Rows to samples to token-budget bins to micro-batches.

`sources` finds rows, converts their formats, checks and orders them; `media` decodes their files, in processes of its own;
`processors` encode a row through a Hugging Face processor and label it; `loading` measures samples and streams the steps of a
run. `sample` holds samples and micro-batches.
Import from the modules: this package stays light, so that the command line can answer at once.
"""
