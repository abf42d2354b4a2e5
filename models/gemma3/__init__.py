"""Gemma 3 with images: sliding and full layers, two-way attention within an image, behind a SigLIP tower."""

from zoo.models import family

FAMILY = family(__name__, "Gemma3", "Gemma 3", "text image", "vision projector language")
