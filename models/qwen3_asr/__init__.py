"""Qwen3-ASR: Qwen3-Omni's audio tower and a projector before a dense Qwen3 decoder."""

from zoo.models import family

FAMILY = family(__name__, "Qwen3ASR", "Qwen3-ASR", "text audio", "audio projector language")
