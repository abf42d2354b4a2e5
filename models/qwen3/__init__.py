"""Qwen3: text alone, dense or with experts; queries and keys are normed in each head."""

from zoo.models import family

FAMILY = family(__name__, "Qwen3", "Qwen3", "text", "language", experts=True)
