"""Losses that are not of each label by itself, and which of them a step has."""
