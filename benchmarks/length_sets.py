"""Lengths of data sets, drawn from distributions that are written down here: what the planner is measured on.

None is a copy of a data set. Each is made of what is published about one (sizes of images, shares of sources, durations),
turned into tokens by the arithmetic of a vision tower with patches of 16 x 16 pixels of which 2 x 2 make one token, 1 s of
video (two frames) being a temporal patch.

| set | rows | after |
|---|---|---|
| receipts | a photo of 0.3 to 2.4 megapixels, an answer of 60 to 900 tokens that grows with the receipt | CORD (Park et al. 2019) |
| llava-mix | ten sources in their shares, a sixteenth of them without an image, of several turns | the 665 k rows of LLaVA 1.5 (Liu et al. 2023, table 7) |
| long-video | 5 s to 30 min, log-uniform; frames shrink so that a video stays within 12,288 tokens; timestamps | what Qwen3-VL's processor makes of such videos |
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

PIXELS = 32 * 32  # of one token
VIDEO_TOKENS = 12_288  # most of one video
VIDEO_SECONDS = 384  # most temporal patches of one video
FRAME_TOKENS = 220  # of 640 x 360 pixels
TIMESTAMP = 9  # tokens around each temporal patch


@dataclass(frozen=True)
class Drawn:
    """One row: its tokens, and those of each image or temporal patch, which the vision tower sees by itself."""

    length: int
    items: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A part of a mixture: thousands of rows, pixels of its images (0: none), and text tokens as a log-normal."""

    rows: float
    pixels: int
    text: float  # median
    spread: float  # sigma of the logarithm


LLAVA_MIX = (
    Source(158, 640 * 480, 330, 0.35),  # LLaVA-Instruct: conversations, detail, reasoning
    Source(40, 0, 1100, 0.6),  # ShareGPT, text alone
    Source(83, 640 * 480, 120, 0.5),  # VQAv2, several questions an image
    Source(72, 500 * 375, 190, 0.5),  # GQA
    Source(9, 640 * 480, 60, 0.3),  # OK-VQA
    Source(80, 330 * 500, 140, 0.3),  # OCR-VQA, covers of books
    Source(66, 640 * 480, 90, 0.3),  # A-OKVQA
    Source(22, 1024 * 768, 60, 0.2),  # TextCaps
    Source(48, 640 * 480, 280, 0.5),  # RefCOCO
    Source(86, 500 * 375, 330, 0.5),  # Visual Genome
)


def draw(name: str, count: int, seed: int = 0) -> list[Drawn]:
    """`count` rows of a set, the same for the same seed.

    Raises:
        ValueError: no such set.
    """
    if name not in SETS:
        raise ValueError(f"no set {name!r}; known: {', '.join(SETS)}")
    random_ = random.Random(f"{name}/{seed}")
    return [SETS[name](random_) for _ in range(count)]


def _receipt(draw: random.Random) -> Drawn:
    tokens = round(math.exp(draw.uniform(math.log(0.3e6), math.log(2.4e6))) / PIXELS)
    answer = min(max(round(draw.lognormvariate(math.log(220), 0.55)), 60), 900)
    return Drawn(40 + tokens + answer, (tokens,))


def _llava_mix(draw: random.Random) -> Drawn:
    (source,) = draw.choices(LLAVA_MIX, [source.rows for source in LLAVA_MIX])
    text = min(max(round(draw.lognormvariate(math.log(source.text), source.spread)), 16), 3500)
    if not source.pixels:
        return Drawn(20 + text)
    tokens = round(source.pixels * draw.uniform(0.7, 1.1) / PIXELS)
    return Drawn(20 + text + tokens, (tokens,))


def _long_video(draw: random.Random) -> Drawn:
    seconds = math.exp(draw.uniform(math.log(5), math.log(1800)))
    patches = min(round(seconds), VIDEO_SECONDS)
    tokens = min(FRAME_TOKENS, VIDEO_TOKENS // patches)
    answer = min(max(round(draw.lognormvariate(math.log(120), 0.7)), 10), 800)
    return Drawn(40 + patches * (tokens + TIMESTAMP) + answer, (tokens,) * patches)


SETS: dict[str, Callable[[random.Random], Drawn]] = {
    "receipts": _receipt,
    "llava-mix": _llava_mix,
    "long-video": _long_video,
}
