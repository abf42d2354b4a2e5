"""Scores of answers against what was wanted, and which of them a row has."""
