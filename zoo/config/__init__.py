"""Recipes: their schema, how files and overrides compose into one, and the checks before a run."""
