"""InternVL: InternViT and its projector from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import Encoded, Media
from zoo.nn.vision_language import TileModel


class InternVLModel(TileModel):
    """Each tile is a picture of its own to the tower; nothing is put between tiles."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision tower, with weights as transformers initialises them, and the projector."""
        from transformers import AutoModel
        from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

        projector = InternVLMultiModalProjector(config.hf)
        return {"vision": AutoModel.from_config(config.vision), "projector": projector}

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Tiles of images and frames of videos, in the order of the row, through the tower in one call."""
        if "pixel_values" not in media:
            return {}
        patches = self.vision(media["pixel_values"]).last_hidden_state[:, 1:]  # without the class
        squares = pixel_shuffle(patches, self.projector.layer_norm.normalized_shape[0])
        return {"vision": Encoded(self.projector(squares).flatten(0, 1))}


def pixel_shuffle(patches: Tensor, width: int) -> Tensor:
    """(N, P, D) patches of square tiles -> (N, P * D / width, width): each square of neighbours one after the other.

    As `InternVLModel.pixel_shuffle` of transformers does it; `width` is D times the patches of such a square.
    """
    side, merge = (int(count**0.5) for count in (patches.shape[1], width // patches.shape[2]))
    squares = patches.unflatten(1, (side // merge, merge, side // merge, merge))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)
