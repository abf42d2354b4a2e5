"""Qwen3-Omni, the thinker: text MoE decoder, vision tower with deepstack, audio tower."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3Omni",
    "Qwen3-Omni (thinker)",
    modalities="text image video audio",
    parts="vision audio language",
    merger="vision.merger. vision.merger_list.",
    audio_projector="audio.proj1. audio.proj2.",
    proved="tp sp pp vpp cp ep etp dp",
    step="zoo.steps.omni:OmniStep",
)
