"""What families share of their models: a decoder alone, one with a vision tower of transformers, and one with an audio tower too."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.nn.decoder.config import transformer_config
from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import Encoded, Media, Stage, Vocabulary, on_device_of
from zoo.nn.multimodal import MultimodalModel
from zoo.nn.towers.attention import use_varlen_attention


class LanguageModel(MultimodalModel):
    """Decoder of a family's config, with its traits; no towers unless `build_towers` and `encode` give some."""

    def __init__(self, config: FamilyConfig, recipe: Recipe, stage: Stage, *, varlen: bool = True) -> None:
        """`varlen`: towers take all media as one row, with bounds."""
        towers = self.build_towers(config) if stage.first else {}
        if varlen:
            towers = {name: use_varlen_attention(tower) for name, tower in towers.items()}
        traits = dict.fromkeys(config.traits, True)
        super().__init__(
            transformer_config(config.text, recipe, mtp_layers=config.mtp_layers(recipe), **traits),
            vocabulary=Vocabulary(
                config.text.vocab_size, config.tied, config.embedding_scale, config.logit_softcap, recipe.train.scores
            ),
            rotary=config.rotary,
            local_rotary=config.local_rotary,
            backend=recipe.engine.backend,
            stage=stage,
            towers=towers,
            deepstack_layers={"vision": config.deepstack_layers},
        )

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """Towers by their names, with weights as transformers initialises them."""
        return {}


class VisionLanguageModel(LanguageModel):
    """Decoder with a `vision` tower."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """Towers by their names, with weights as transformers initialises them."""
        from transformers import AutoModel

        return {"vision": AutoModel.from_config(config.vision)}

    def tower_names(self) -> tuple[str, ...]:
        """The name of the one tower."""
        return ("vision",)

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call, with the step's `tower_inputs`."""
        pixels = [media[k] for k in ("pixel_values", "pixel_values_videos") if k in media]
        if not pixels:
            return {}
        grids = torch.cat([media[k] for k in ("image_grid_thw", "video_grid_thw") if k in media])
        worked_out = {name.removeprefix("vision."): x for name, x in media.items() if name.startswith("vision.")}
        seen = self.vision(
            torch.cat(pixels).to(self.vision.dtype), grid_thw=on_device_of(grids, pixels[0]), **worked_out
        )
        deepstack = tuple(seen.deepstack_features) if self.deepstack_layers else ()
        return {"vision": Encoded(seen.pooler_output, deepstack)}


class OmniModel(VisionLanguageModel):
    """Decoder with a `vision` and an `audio` tower, which takes (frames, mel) of all clips and the frames of each."""

    def tower_names(self) -> tuple[str, ...]:
        """The names of both towers."""
        return ("vision", "audio")

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = super().encode(media)
        if "input_features" in media:
            features = media["input_features"].to(self.config.params_dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded


class TileModel(VisionLanguageModel):
    """Decoder with a `vision` tower, which takes pictures of one size as a batch, and its `projector`.

    A family gives both in `build_towers`, and `encode`.
    """

    def __init__(self, config: FamilyConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(config, recipe, stage, varlen=False)

    def zero_of(self, name: str) -> Tensor | float:
        """The projector is idle when its tower is."""
        return super().zero_of(name) + super().zero_of("projector")
