"""The architecture, as transformers describes it."""

from zoo.nn.family import FamilyConfig


class ToyConfig(FamilyConfig):
    """`transformers.Qwen3Config`."""

    title = "Qwen3"
    kinds = ("qwen3",)  # model_type of a config.json
    traits = ("qk_norm",)  # queries and keys are normed, which the config doesn't say
