"""Qwen3: text alone, dense or with experts; queries and keys are normed in each head."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3",
    "Qwen3",
    modalities="text",
    parts="language",
    proved="tp sp pp vpp cp ep etp dp",
    model="zoo.nn.vision_language:LanguageModel",
    step="zoo.steps:PackedStep",
    processor="zoo.data.processors.text:TextProcessor.build",
)
