"""Gemma 4 with images: heads of two widths, two-way attention within an image in sliding layers, behind a tower of patches."""

from zoo.models import family

FAMILY = family(__name__, "Gemma4", "Gemma 4", "text image", "vision projector language")
