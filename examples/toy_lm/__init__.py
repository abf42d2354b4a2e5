"""A family in a package of its own: Qwen3's dense language model, text alone. docs/add-a-family.md walks through it."""

from zoo.registry import ModelFamily

FAMILY = ModelFamily(
    name="toy_lm",
    title="Toy LM",
    modalities=("text",),
    parts=("language",),
    config="toy_lm.config:ToyConfig",
    model="toy_lm.model:ToyModel",
    step="zoo.steps:PackedStep",
    bridge="toy_lm.bridge:BRIDGE",
    processor="toy_lm.processor:build_processor",
)
