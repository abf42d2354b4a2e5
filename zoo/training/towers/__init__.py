"""Towers whose work ranks share: who encodes what, and the exchanges around micro-batches."""
