"""How many embeddings an image or a video has, and where they stand: what step, model and processor must agree on.

A tile is a square of `image_size` pixels that the tower sees at once. LLaVA 1.5 has one tile an image; NeXT and
OneVision have one of the whole image, and more of a grid that it is cut into, laid out by lines that each end with a
learnt embedding. All of it follows from sizes on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Patches of an image that is cut into tiles, the tile of the whole image aside."""

    rows: int  # tiles
    columns: int
    above: int  # lines of patches that are padding, as many below
    left: int  # and to the left, as many to the right
    height: int  # patches in the end, scaled down where they are too many
    width: int
    scaled: bool

    @property
    def tokens(self) -> int:
        """Number of embeddings, one at the end of each line included."""
        return self.height * (self.width + 1)


@dataclass(frozen=True)
class Tiling:
    """A variant's arithmetic, as transformers' `pack_image_features` and `apply_pooling` of its model do it."""

    tile: int  # pixels a side
    side: int  # patches a side of a tile
    tile_tokens: int  # embeddings of a tile
    lines: bool  # images and videos end with an embedding of their own
    pinpoints: tuple[tuple[int, int], ...] = ()  # (height, width) in pixels that an image may be cut at
    most_tiles: int | None = None  # an image of more patches than these have is scaled down

    def tiles(self, height: int, width: int) -> int:
        """Number of tiles that a cut image gives, the one of the whole image included."""
        rows, columns = self._cut(height, width)
        return rows * columns + 1

    def image_tokens(self, height: int, width: int, tiles: int) -> int:
        """Embeddings of an image of so many pixels in `tiles` tiles."""
        if tiles == 1:
            return self.tile_tokens + self.lines
        return self.tile_tokens + self.grid(height, width).tokens

    def frame_tokens(self, last: int) -> int:
        """Embeddings of a frame, of which 2 x 2 patches make one; of the `last` (1, else 0) one more, its video's end."""
        return self.pooled**2 + last

    @property
    def pooled(self) -> int:
        """Embeddings a side of a frame."""
        return math.ceil(self.side / 2)

    def grid(self, height: int, width: int) -> Grid:
        """Where the patches of an image of `height` x `width` pixels stand.

        The image fills its tiles in one direction and is padded in the other; lines of patches in which padding is are
        dropped on either side, rounded down.
        """
        rows, columns = self._cut(height, width)
        high, width_in_pixels = rows * self.side, columns * self.side
        above = left = 0
        if width * high > width_in_pixels * height:  # it is wider than its tiles
            above = (high - height * width_in_pixels // width) // 2
        else:
            left = (width_in_pixels - width * high // height) // 2
        high, width_in_pixels = high - 2 * above, width_in_pixels - 2 * left
        ratio = math.sqrt(high * width_in_pixels / (self.most_tiles * self.side**2)) if self.most_tiles else 0.0
        scaled = ratio > 1.1
        if scaled:
            high, width_in_pixels = int(high // ratio), int(width_in_pixels // ratio)
        return Grid(rows, columns, above, left, high, width_in_pixels, scaled)

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        from transformers.image_processing_utils import select_best_resolution

        high, wide = select_best_resolution((height, width), self.pinpoints)
        return high // self.tile, wide // self.tile
