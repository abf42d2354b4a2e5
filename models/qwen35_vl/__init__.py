"""Qwen3.5-VL, Qwen3.6 and Qwen3.8: decoder of gated delta rule and gated attention layers, dense or with experts; vision tower; MTP."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen35VL",
    "Qwen3.5-VL, 3.6, 3.8",
    "text image video",
    "vision language",
    experts=True,
    merger="vision.merger.",
    model="zoo.nn.vision_language:VisionLanguageModel",
    step="zoo.steps.vision:VisionStep",
    processor="zoo.data.processors.timestamped:TimestampedProcessor.build",
)
