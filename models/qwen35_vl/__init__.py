"""Qwen3.5-VL: decoder of gated delta rule and gated attention layers, dense or with experts; vision tower; MTP."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen35VL",
    "Qwen3.5-VL",
    modalities="text image video",
    parts="vision language",
    proved="tp sp pp vpp cp ep etp dp",
)
