"""Qwen2.5-Omni, the thinker: Qwen2's decoder, a vision tower with windows, an audio tower."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen25Omni",
    "Qwen2.5-Omni (thinker)",
    "text image video audio",
    "vision audio talker language",
    merger="vision.merger.",
    audio_projector="audio.proj.",
)
