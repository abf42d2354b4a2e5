"""Qwen3-Next: text alone; gated delta rule and gated attention layers with many small experts; MTP."""

from zoo.models import family

FAMILY = family(
    __name__,
    "Qwen3Next",
    "Qwen3-Next",
    modalities="text",
    parts="language",
    proved="tp sp pp vpp cp ep etp dp",
    model="zoo.nn.vision_language:LanguageModel",
    step="zoo.steps:PackedStep",
    processor="zoo.data.processors.text:TextProcessor.build",
    mtp=("num_nextn_predict_layers", 1),
)
