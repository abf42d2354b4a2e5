"""A family in a package of its own: Qwen3's dense language model, text alone. docs/add-a-family.md walks through it."""

from zoo.registry import ModelFamily

FAMILY = ModelFamily(
    name="toy_lm",
    title="Toy LM",
    modalities=("text",),
    parts=("language",),
    config="toy_lm.config:ToyConfig",
    model="zoo.nn.vision_language:LanguageModel",
    step="zoo.steps:PackedStep",
    bridge="toy_lm.bridge:BRIDGE",
    processor="zoo.data.processors.text:TextProcessor.build",
)
