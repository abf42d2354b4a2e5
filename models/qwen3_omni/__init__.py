"""Qwen3-Omni, the thinker: text MoE decoder, vision tower with deepstack, audio tower."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3Omni",
    "Qwen3-Omni (thinker)",
    modalities="text image video audio",
    parts="vision audio language",
    proved="tp sp pp vpp cp ep etp dp",
    step="zoo.steps.omni:OmniStep",
)
