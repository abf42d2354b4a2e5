"""Qwen3-VL: decoder with QK norm, dense or with experts; vision tower with deepstack."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3VL",
    "Qwen3-VL",
    modalities="text image video",
    parts="vision language",
    merger="vision.merger. vision.deepstack_merger_list.",
    proved="tp sp pp vpp cp ep etp dp",
    model="zoo.nn.vision_language:VisionLanguageModel",
    step="zoo.steps.vision:VisionStep",
    processor="zoo.data.processors.timestamped:TimestampedProcessor.build",
)
