"""Checkpoints of a run: copied aside, written in the background, published whole, checked, selected, exported."""
