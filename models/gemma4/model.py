"""Gemma 4: its tower and the projector from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import Encoded, Media
from zoo.nn.vision_language import TileModel
from zoo.packing.index import cpu_to_device


class Gemma4Model(TileModel):
    """Decoder with a `vision` tower and its `projector`."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The tower, with the mean and the spread of what it gives as parameters that no update moves, and the projector.

        Its attention doesn't divide logits by sqrt(D): norms of queries and keys begin at D ** -0.25, as the decoder's.
        """
        from transformers import AutoModel
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

        tower = AutoModel.from_config(config.vision)
        for name in ("std_bias", "std_scale"):
            if hasattr(tower, name):
                value = getattr(tower, name)
                delattr(tower, name)
                setattr(tower, name, torch.nn.Parameter(value, requires_grad=False))
        for layer in tower.encoder.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                torch.nn.init.constant_(norm.weight, norm.weight.numel() ** -0.25)
        return {"vision": tower, "projector": Gemma4MultimodalEmbedder(config.vision, config.text)}

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images through the tower in one call, padded to the one with most patches."""
        if "pixel_values" not in media:
            return {}
        grids = media["image_grids"].tolist()  # on the host
        pixels, places = media["pixel_values"], cpu_to_device(_places(grids), media["pixel_values"].device)
        patches = pixels.split([high * width for high, width in grids])
        seen = self.vision(pad_sequence(patches, batch_first=True), pixel_position_ids=places)
        return {"vision": Encoded(self.projector(seen.last_hidden_state))}


def _places(grids: list[list[int]]) -> Tensor:
    """(N, P, 2) int64 places (x, y) of the patches of images of (high, wide) patches, line by line; -1 behind an image's last."""
    places = [torch.cartesian_prod(torch.arange(high), torch.arange(width)).flip(-1) for high, width in grids]
    return pad_sequence(places, batch_first=True, padding_value=-1)
