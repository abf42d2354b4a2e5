"""Qwen3-VL: decoder with QK norm, dense or with experts; vision tower with deepstack."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3VL",
    "Qwen3-VL",
    "text image video",
    "vision language",
    experts=True,
    merger="vision.merger. vision.deepstack_merger_list.",
    model="zoo.nn.vision_language:VisionLanguageModel",
    step="zoo.steps.vision:VisionStep",
    processor="zoo.data.processors.timestamped:TimestampedProcessor.build",
)
