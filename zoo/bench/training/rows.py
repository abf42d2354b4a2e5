"""Samples of `zoo bench train` for every family, and for transformers' model of it.

Images as grids of patches are `zoo.bench.training.receipts`. Other families read rows of the same sizes: an image of n
squares of 28 pixels, of random content; without images a clip as long as n tokens; without either text in its place.
A row goes through the family's processor, so that the model of transformers gets what that processor gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.bench.training.receipts import PROMPT, SEED, Sizes, draw_sizes, marks, receipts
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.references import AudioSamples, OpenImage
from zoo.data.sources.rows import Message, Row
from zoo.errors import UserError
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.model.build import Assembly

SQUARE = 28  # pixels a side
TOKENS_A_SECOND = 13  # of a clip
RATE = 16_000  # of sound, in Hz
OF_TOKENS = ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids")  # (1, L)


class Example(NamedTuple):
    """A sample, and the arguments of transformers' model for it; of a receipt, which has no pixels yet, none."""

    sample: Sample
    features: dict[str, Tensor]


def examples(assembly: Assembly, count: int, longest: int) -> list[Example]:
    """The first `count` samples of a family; all tokens of text have loss.

    Raises:
        UserError: a picture or clip that leaves no room for text.
    """
    if marks(assembly.config):
        return [Example(sample, {}) for sample in receipts(assembly.config, count, longest)]
    generator = torch.Generator().manual_seed(SEED)
    return [_short_enough(assembly, number, draw_sizes(generator, longest), longest) for number in range(count)]


def _short_enough(assembly: Assembly, number: int, sizes: Sizes, longest: int) -> Example:
    """A row of at most `longest` tokens: its answer is cut off behind."""
    processor, answer = assembly.processor, max(sizes.answer, 1)
    while True:
        row = _row(assembly.family.modalities, number, sizes._replace(answer=answer))
        sample, features = processor.encode_both(row, video_fps=1.0, max_frames=1, labels="all")
        over = sample.length - longest
        if over <= 0:
            tensors = {name: x for name, x in features.items() if isinstance(x, Tensor)}
            return Example(sample, {**tensors, "labels": sample.labels[None]})
        if answer == 1:
            raise UserError(
                f"zoo bench train: a sample of {assembly.family.title} has {sample.length} tokens with one of text behind "
                f"its medium; give longest={sample.length + 100} or more"
            )
        answer = max(answer - over, 1)


def _row(modalities: Sequence[str], number: int, sizes: Sizes) -> Row:
    draw = np.random.default_rng(SEED + 1 + number)
    media: JsonObject = {}
    asked = _digits(draw, PROMPT)
    if "image" in modalities:
        from PIL import Image

        pixels = draw.integers(0, 256, (SQUARE * sizes.height, SQUARE * sizes.width, 3), dtype=np.uint8)
        asked, media = f"<image>{asked}", {"images": (OpenImage(Image.fromarray(pixels), f"receipt {number}"),)}
    elif "audio" in modalities:  # their templates may write nothing beside a clip
        heard = draw.normal(0.0, 0.1, sizes.height * sizes.width * RATE // TOKENS_A_SECOND)
        asked, media = "<audio>", {"audios": (AudioSamples(heard.astype(np.float32), RATE, f"receipt {number}"),)}
    else:
        asked = _digits(draw, PROMPT + sizes.height * sizes.width)
    messages = (Message("user", asked), Message("assistant", _digits(draw, sizes.answer)))
    return Row(messages, **media, source=f"receipt {number}", trusted=True)


def _digits(draw: np.random.Generator, count: int) -> str:
    """A text of about so many tokens."""
    return "".join(map(str, draw.integers(0, 10, count)))


def collate(features: Sequence[dict[str, Tensor]], width: int | None) -> dict[str, Tensor]:
    """Arguments of transformers' model for several rows, side by side.

    Tokens are padded on the right, to the longest row or to `width`; media are joined along dim 0, and filled up with zeros to
    the largest in their other dims, as processors do.
    """
    longest = width or max(inputs["input_ids"].shape[1] for inputs in features)
    batch = {}
    for name in dict.fromkeys(name for inputs in features for name in inputs):
        parts = [inputs[name] for inputs in features if name in inputs]
        shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        shape = [longest] if name in OF_TOKENS else shape
        batch[name] = torch.cat([_filled(part, shape, IGNORE if name == "labels" else 0) for part in parts])
    return batch


def _filled(x: Tensor, shape: Sequence[int], fill: int) -> Tensor:
    """(N, *shape) with x in its corner."""
    full = x.new_full((x.shape[0], *shape), fill)
    full[tuple(slice(size) for size in x.shape)] = x
    return full
