"""Answers of a model to rows: prompts, the choice of tokens, and the passes that make them."""
