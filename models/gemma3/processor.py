"""Gemma 3's processor, around transformers'.

Media tensors of a sample (each joined along dim 0 over samples): pixel_values (N, 3, S, S) float32, the images, behind each
the crops that pan and scan makes of it where `do_pan_and_scan` of the image processor's settings is true; image_tokens (N,) int64, the embeddings
that each becomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors.answers import TURNS
from zoo.data.processors.boxes import Coordinates
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import Processor, as_tensor
from zoo.data.processors.vision import MARKERS, load_processor
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.models.gemma3.config import Gemma3Config
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

# The bundled tokenizer's tokens for the beginning, the placeholders and the end of an image.
TINY_TOKENS = {"boi_token": "<|vision_start|>", "image_token": "<|image_pad|>", "eoi_token": "<|vision_end|>"}
# What transformers writes before an image that has crops, and between the two.
ORIGINAL, CROPS = "Here is the original image ", " and here are some crops to help you see better "


class Gemma3Processor(Processor):
    """`Processor` around `transformers.Gemma3Processor`."""

    modalities = ("text", "image")
    coordinates = Coordinates(y_first=True)  # as Gemini's, by the bounding boxes of Google's documentation

    def __init__(self, hf: ProcessorMixin) -> None:
        known = hf.tokenizer.get_vocab()
        super().__init__(hf, TURNS if TURNS.end in known else MARKERS)

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the tokens of images and around them."""
        names = ("boi_token", "image_token", "eoi_token")
        return {f"{name}_index": getattr(self.tokenizer, f"{name}_id") for name in names}

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the tokens of images and around them."""
        return frozenset(self.token_ids.values())

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """All images as one sample's; pan and scan as the image processor's settings say, which transformers' calls leave off."""
        if not row.images:
            return {}
        return {"images": [media.arguments["images"]], "images_kwargs": dict(self._pan_and_scan)}

    @property
    def _pan_and_scan(self) -> JsonObject:
        """Settings of pan and scan; empty where it is off."""
        images = self.hf.image_processor
        if not images.do_pan_and_scan:
            return {}
        names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        settings = {f"pan_and_scan_{name}": getattr(images, f"pan_and_scan_{name}") for name in names}
        return {"do_pan_and_scan": True} | {name: value for name, value in settings.items() if value is not None}

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The tower's tensors; see the module's docstring."""
        if "pixel_values" not in features:
            return {}
        pixels = as_tensor(features["pixel_values"], torch.float32)
        return {"pixel_values": pixels, "image_tokens": torch.full((len(pixels),), self.hf.image_seq_length)}

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that images and crops give."""
        return {self.tokenizer.image_token: int(media["image_tokens"].sum()) if media else 0}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Images and crops, one by one."""
        return {"vision": [1] * len(media.get("pixel_values", ()))}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text with what transformers writes around images and crops."""
        crops = [crops_of(*size, **self._pan_and_scan) for size in headers.images]
        pieces = text.split(self.tokenizer.boi_token)
        if len(pieces) != len(crops) + 1:
            return None
        image_span = f"\n\n{self.tokenizer.boi_token}{self.tokenizer.eoi_token}\n\n"
        written = pieces[0]
        for count, piece in zip(crops, pieces[1:], strict=True):
            seen = f"{ORIGINAL}{image_span}{CROPS}{' '.join([image_span] * count)}" if count else image_span
            written += seen + piece
        images = len(crops) + sum(crops)
        return Sketch(written, images * self.hf.image_seq_length, {"vision": [1] * images})


def crops_of(
    height: int,
    width: int,
    *,
    do_pan_and_scan: bool = False,
    pan_and_scan_min_crop_size: int = 256,
    pan_and_scan_max_num_crops: int = 4,
    pan_and_scan_min_ratio_to_activate: float = 1.2,
) -> int:
    """How many crops pan and scan makes of an image of so many pixels; its arguments as transformers' processor has them.

    Along the longer side, as many as the sides' ratio, from 2 to the most there may be, and none that is too small.
    """
    long, short = max(height, width), min(height, width)
    if not do_pan_and_scan or long / short < pan_and_scan_min_ratio_to_activate:
        return 0
    count = min(long // pan_and_scan_min_crop_size, math.floor(long / short + 0.5))
    count = min(pan_and_scan_max_num_crops, max(2, count))
    return count if min(math.ceil(long / count), short) >= pan_and_scan_min_crop_size else 0


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Gemma3Processor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    arch = arch_config if isinstance(arch_config, dict) else arch_config.to_dict()
    config = Gemma3Config.from_arch(arch)
    side, tokens = config.vision.image_size, config.hf.mm_tokens_per_image
    if source is None:
        return Gemma3Processor(_make(side, tokens))
    wanted = {"image_processor.size": {"height": side, "width": side}, "image_processor.image_seq_length": tokens}
    return Gemma3Processor(load_processor(source, "Gemma3Processor", wanted))


def _make(side: int, tokens: int) -> ProcessorMixin:
    """A processor of the bundled tokenizer, for images of so many pixels a side and so many tokens."""
    from transformers import AutoTokenizer, Gemma3ImageProcessor
    from transformers import Gemma3Processor as Processor

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER, extra_special_tokens=TINY_TOKENS)
    # The bundled strips are long: a crop for each digit of a line.
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32, "pan_and_scan_max_num_crops": 6}
    size = {"height": side, "width": side}
    images = Gemma3ImageProcessor(size=size, image_seq_length=tokens, **crops)
    template = tokenizer.chat_template.replace("".join(TINY_TOKENS.values()), TINY_TOKENS["boi_token"])
    return Processor(images, tokenizer, chat_template=template, image_seq_length=tokens)
