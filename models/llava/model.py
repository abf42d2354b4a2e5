"""LLaVA: a CLIP or SigLIP tower from transformers, a projector and the layout of tiles on zoo's multimodal decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from zoo.config.schema import Recipe
from zoo.models.llava.config import LlavaConfig
from zoo.nn.inputs import Encoded, Media, Stage
from zoo.nn.vision_language import TileModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Tower(torch.nn.Module):
    """transformers' CLIP or SigLIP tower, run up to the last layer whose output is used.

    What lies behind that layer (the last one of the published LLaVA 1.5 and 1.6) is kept for the export, and not trained.
    """

    embeddings: torch.nn.Module
    pre_layrnorm: torch.nn.Module  # CLIP's alone; transformers' spelling
    encoder: Any  # with `layers`
    post_layernorm: torch.nn.Module

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        for name, part in AutoModel.from_config(config.vision).named_children():
            self.add_module(name, part)
        self.chosen = config.feature_layers
        self.first_patch = int(config.drops_first)
        behind = {*self.encoder.layers[max(self.chosen) :], self.post_layernorm, getattr(self, "head", None)}
        for part in behind - {None}:  # SigLIP's pooling head is there in some
            part.requires_grad_(False)

    def forward(self, tiles: Tensor) -> Tensor:
        """(N, 3, S, S) tiles -> (N, tile_tokens, width): the chosen layers' outputs side by side."""
        hidden = self.embeddings(tiles)
        if hasattr(self, "pre_layrnorm"):
            hidden = self.pre_layrnorm(hidden)
        seen = {}
        for number, layer in enumerate(self.encoder.layers[: max(self.chosen)], start=1):
            hidden = seen[number] = layer(hidden, None)
        return torch.cat([seen[number][:, self.first_patch :] for number in self.chosen], dim=-1)


class Projector(LlavaMultiModalProjector):
    """transformers' projector, with the embedding that ends a line of patches in the variants that have one."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config.hf)
        if config.lines:
            width = config.text.hidden_size
            self.image_newline = torch.nn.Parameter(torch.randn(width) * width**-0.5)


class LlavaModel(TileModel):
    """Tiles are laid out by lines, each with an embedding at its end."""

    def __init__(self, config: LlavaConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(config, recipe, stage)
        self.tiling = config.tiling

    def build_towers(self, config: PretrainedConfig) -> dict[str, torch.nn.Module]:
        """The vision tower up to the last layer that is used, and the projector."""
        return {"vision": Tower(config), "projector": Projector(config)}

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Tiles of images and frames of videos through the tower in one call, then images and videos one by one."""
        images, frames = (media.get(name) for name in ("pixel_values", "pixel_values_videos"))
        tiles = [tiles for tiles in (images, frames) if tiles is not None]
        if not tiles:
            return {}
        features = self.projector(self.vision(torch.cat(tiles)))
        laid_out: list[Tensor] = []
        if images is not None:
            sizes = media["image_tiles"].tolist()  # on the host
            pieces = features[: len(images)].split([count for *_, count in sizes])
            laid_out += [self._image(p, *size) for p, (*size, _) in zip(pieces, sizes, strict=True)]
        if frames is not None:
            laid_out += self._frames(features[-len(frames) :], media["video_ends"].tolist())
        return {"vision": Encoded(torch.cat(laid_out))}

    def _image(self, features: Tensor, height: int, width: int) -> Tensor:
        """(n, tile_tokens, hidden) of an image's tiles, the whole image first -> (tokens, hidden)."""
        whole, parts = features[0], features[1:]
        if not len(parts):
            return torch.cat((whole, self._newline)) if self.tiling.lines else whole
        grid, side = self.tiling.grid(height, width), self.tiling.side
        patches = parts.unflatten(0, (grid.rows, grid.columns)).unflatten(2, (side, side))
        lines = patches.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (high, wide, hidden)
        high, wide = lines.shape[:2]
        lines = lines[grid.above : high - grid.above, grid.left : wide - grid.left]
        if grid.scaled:
            lines = _resize(lines[None], grid.height, grid.width)[0]
        ends = self._newline.expand(len(lines), 1, -1)
        return torch.cat((whole, torch.cat((lines, ends), dim=1).flatten(0, 1)))

    def _frames(self, features: Tensor, ends: list[int]) -> list[Tensor]:
        """(F, side * side, hidden) of frames -> each one's embeddings, at the end of a video with one more."""
        pooled = _resize(features.unflatten(1, (self.tiling.side,) * 2), self.tiling.pooled, self.tiling.pooled)
        frames = pooled.flatten(1, 2).unbind()
        return [torch.cat((frame, self._newline)) if last else frame for frame, last in zip(frames, ends, strict=True)]

    @property
    def _newline(self) -> Tensor:
        """(1, hidden), what ends a line of patches."""
        newline: Tensor = self.projector.image_newline
        return newline[None]


def _resize(x: Tensor, height: int, width: int) -> Tensor:
    """(N, high, wide, D) -> (N, height, width, D), bilinear."""
    return F.interpolate(x.permute(0, 3, 1, 2), (height, width), mode="bilinear").permute(0, 2, 3, 1)
