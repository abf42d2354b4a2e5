"""Qwen2.5-Omni, the thinker: Qwen2's decoder, a vision tower with windows, an audio tower."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen25Omni",
    "Qwen2.5-Omni (thinker)",
    modalities="text image video audio",
    parts="vision audio language",
    merger="vision.merger.",
    audio_projector="audio.proj.",
    proved="tp sp pp vpp cp dp",
)
