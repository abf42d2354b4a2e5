"""Qwen3.5 of text alone: the decoder of Qwen3.5 to Qwen3.8 without its vision tower, dense or with experts; MTP."""

from zoo.models import family

FAMILY = family(__name__, "Qwen35Text", "Qwen3.5, text", "text", "language", experts=True)
