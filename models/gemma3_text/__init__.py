"""Gemma 3 of text alone: sliding and full layers."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Gemma3Text",
    "Gemma 3, text",
    "text",
    "language",
    processor="zoo.models.gemma3_text.processor:Gemma3TextProcessor.build",
)
