"""The model: zoo's decoder, without towers."""

from zoo.nn.decoder.config import transformer_config
from zoo.nn.multimodal import MultimodalModel


class ToyModel(MultimodalModel):
    """Qwen3 normalises queries and keys, which its config doesn't say."""

    def __init__(self, config, recipe, stage) -> None:
        super().__init__(
            transformer_config(config.text, recipe, qk_norm=True),
            vocab_size=config.text.vocab_size,
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=stage,
            towers={},
            tied=config.tied,
        )

    def encode(self, media):
        """No media."""
        return {}
