"""The samples of `zoo bench train`: an image, as a photo of a receipt is, between a prompt and an answer, of random content.

An image of 20 to 40 x 20 to 36 tokens (400 to 1,440) stands behind 8 tokens of a prompt; 100 to 600 tokens of text
follow; all sizes are drawn evenly. Tokens of text carry loss, those of the image don't. Nothing is longer than `longest`:
text is cut off behind. Under a `longest` of 1,024 all sizes shrink, for tests. Families whose images are no grids of patches
have those of `zoo.bench.training.rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from zoo.data.sample import IGNORE, Sample

SEED = 1234
PROMPT = 8  # tokens
VOCABULARY = 400  # tokens of text are below


class Sizes(NamedTuple):
    """A sample's sides of its image, and the text behind it, in tokens."""

    height: int
    width: int
    answer: int


def draw_sizes(generator: torch.Generator, longest: int) -> Sizes:
    """The next sample's sizes."""
    scale = 1.0 if longest >= 1024 else longest / 2048

    def number(low: int, high: int, factor: float) -> int:
        return int(int(torch.randint(low, high + 1, (1,), generator=generator)) * factor)

    return Sizes(number(20, 40, scale**0.5), number(20, 36, scale**0.5), number(100, 600, scale))


def marks(config: Any) -> tuple[int, int] | None:
    """Ids of the tokens around an image; None for a family without images as grids of patches."""
    names = ("start_token_id", "end_token_id")
    events: list[Any] = [
        getattr(config.root, f"vision_{name}", getattr(config.root, f"image_{name}", None)) for name in names
    ]
    if config.vision is None or not hasattr(config.vision, "spatial_merge_size") or None in events:
        return None
    return events[0], events[1]


def receipts(config: Any, count: int, longest: int = 2048) -> list[Sample]:
    """The first `count` samples of the one sequence there is, without their pixels (`with_pixels`).

    Args:
        config: that of a family with `marks`; its token ids of an image are used.
        longest: most tokens of a sample.
    """
    start, end = marks(config) or (0, 0)
    image = config.root.image_token_id
    special = [start, image, end, config.root.video_token_id]
    merge = config.vision.spatial_merge_size
    generator = torch.Generator().manual_seed(SEED)

    def text(tokens: int) -> torch.Tensor:
        return torch.randint(0, min(VOCABULARY, *special), (tokens,), generator=generator)

    samples = []
    for step in range(count):
        height, width, answer = draw_sizes(generator, longest)
        prompt = text(PROMPT)
        middle = [torch.tensor([start]), torch.full((height * width,), image), torch.tensor([end])]
        ids = torch.cat([prompt, *middle, text(answer)])[:longest]
        grid = torch.tensor([[1, merge * height, merge * width]])
        labels = ids.masked_fill(ids == image, IGNORE)
        samples.append(Sample(ids, labels, {"image_grid_thw": grid}, source=f"receipt {step}"))
    return samples


def with_pixels(sample: Sample, config: Any) -> Sample:
    """The sample with pixel_values (P, C * tp * p * p) float32, the same whenever and wherever they are drawn.

    One without a grid has its media already.
    """
    if "image_grid_thw" not in sample.media:
        return sample
    vision = config.vision
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(SEED + 1 + int(sample.source.rpartition(" ")[2]))
    pixels = torch.randn(int(sample.media["image_grid_thw"].prod()), width, generator=generator)
    return Sample(sample.input_ids, sample.labels, {"pixel_values": pixels, **sample.media}, source=sample.source)
