"""Qwen3-Omni, the thinker: text MoE decoder, vision tower with deepstack, audio tower."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3Omni",
    "Qwen3-Omni (thinker)",
    "text image video audio",
    "vision audio talker language",
    experts=True,
    step="zoo.steps.speech:SpeakingStep",
    merger="vision.merger. vision.merger_list.",
    audio_projector="audio.proj1. audio.proj2.",
)
