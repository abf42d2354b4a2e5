"""LLaVA: a CLIP or SigLIP tower from transformers, a projector and the layout of tiles on zoo's multimodal decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.models.llava.config import LlavaConfig
from zoo.models.llava.tower import Projector, Tower
from zoo.nn.inputs import Encoded, Stage
from zoo.nn.vision_language import TileModel


class LlavaModel(TileModel):
    """Tiles are laid out by lines, each with an embedding at its end."""

    def __init__(self, config: LlavaConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(config, recipe, stage)
        self.tiling = config.tiling

    def build_towers(self, config: Any) -> dict[str, torch.nn.Module]:
        """The vision tower up to the last layer that is used, and the projector."""
        return {"vision": Tower(config), "projector": Projector(config)}

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
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
