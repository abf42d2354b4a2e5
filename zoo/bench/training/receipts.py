"""The samples of `zoo bench train`: an image, as a photo of a receipt is, between a prompt and an answer, of random content.

An image of 20 to 40 x 20 to 36 tokens (400 to 1,440) stands behind 8 tokens of a prompt; 100 to 600 tokens of text
follow; all sizes are drawn evenly. Tokens of text carry loss, those of the image don't. Nothing is longer than `longest`:
text is cut off behind. Under a `longest` of 1,024 all sizes shrink, for tests.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.data.sample import IGNORE, Sample
from zoo.errors import UserError

SEED = 1234
PROMPT = 8  # tokens
VOCABULARY = 400  # tokens of text are below


def receipts(config: Any, count: int, longest: int = 2048) -> list[Sample]:
    """The first `count` samples of the one sequence there is, without their pixels (`with_pixels`).

    Args:
        config: the family's; its token ids of an image are used.
        longest: most tokens of a sample.

    Raises:
        UserError: a family without images as grids of patches.
    """
    root, vision = config.root, config.vision
    names = ("start_token_id", "end_token_id")
    marks = [getattr(root, f"vision_{name}", getattr(root, f"image_{name}", None)) for name in names]
    if vision is None or not hasattr(vision, "spatial_merge_size") or None in marks:
        raise UserError(
            f"zoo bench train: {config.title} takes no images as grids of patches, which its samples have; "
            "name rows of your own or of the bundled digits: data=digits:train settings=row:4096"
        )
    start, image, end = marks[0], root.image_token_id, marks[1]
    special = [start, image, end, root.video_token_id]
    merge = vision.spatial_merge_size
    scale = 1.0 if longest >= 1024 else longest / 2048
    generator = torch.Generator().manual_seed(SEED)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def text(tokens: int) -> torch.Tensor:
        return torch.randint(0, min(VOCABULARY, *special), (tokens,), generator=generator)

    samples = []
    for place in range(count):
        height, width = int(number(20, 40) * scale**0.5), int(number(20, 36) * scale**0.5)
        answer = int(number(100, 600) * scale)
        prompt = text(PROMPT)
        middle = [torch.tensor([start]), torch.full((height * width,), image), torch.tensor([end])]
        ids = torch.cat([prompt, *middle, text(answer)])[:longest]
        grid = torch.tensor([[1, merge * height, merge * width]])
        labels = ids.masked_fill(ids == image, IGNORE)
        samples.append(Sample(ids, labels, {"image_grid_thw": grid}, source=f"receipt {place}"))
    return samples


def with_pixels(sample: Sample, config: Any) -> Sample:
    """The sample with pixel_values (P, C * tp * p * p) float32, the same whenever and wherever they are drawn."""
    vision = config.vision
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(SEED + 1 + int(sample.source.rpartition(" ")[2]))
    pixels = torch.randn(int(sample.media["image_grid_thw"].prod()), width, generator=generator)
    return Sample(
        sample.input_ids, sample.labels, {"pixel_values": pixels, **sample.media}, source=sample.source
    )
