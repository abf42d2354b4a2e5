"""Layers: what one file or one command line sets, and the typed tree of keys that it is set in, for any schema."""
