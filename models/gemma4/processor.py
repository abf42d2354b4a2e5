"""Gemma 4's processor, around transformers'.

Media tensors of a sample (each joined along dim 0 over samples): pixel_values (P, 3 p^2) float32, the patches of all images, line
by line, without padding; image_grids (N, 2) int64, patches that each is high and wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors.answers import ChatMarkers
from zoo.data.processors.boxes import Coordinates
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import Processor, as_tensor
from zoo.data.processors.vision import MARKERS, load_processor
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.models.gemma4.config import Gemma4Config
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

GEMMA = ChatMarkers(header="<|turn>model\n", end="<turn|>")
# The bundled tokenizer's tokens for the beginning, the placeholders and the end of an image and of sound.
TINY_TOKENS = {
    "boi_token": "<|vision_start|>",
    "image_token": "<|image_pad|>",
    "eoi_token": "<|vision_end|>",
    "boa_token": "<|audio_start|>",
    "audio_token": "<|audio_pad|>",
    "eoa_token": "<|audio_end|>",
}


class Gemma4Processor(Processor):
    """`Processor` around `transformers.Gemma4Processor`."""

    modalities = ("text", "image")
    coordinates = Coordinates(y_first=True)  # as Gemini's, by the bounding boxes of Google's documentation

    def __init__(self, hf: ProcessorMixin) -> None:
        known = hf.tokenizer.get_vocab()
        super().__init__(hf, GEMMA if GEMMA.end in known else MARKERS)

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the tokens of images and around them."""
        names = ("boi_token", "image_token", "eoi_token")
        return {f"{name}_id": getattr(self.tokenizer, f"{name}_id") for name in names}

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the tokens of images and around them."""
        return frozenset(self.token_ids.values())

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """All images as one sample's."""
        return {"images": [media.arguments["images"]]} if row.images else {}

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The tower's tensors; see the module's docstring."""
        if "pixel_values" not in features:
            return {}
        places = as_tensor(features["image_position_ids"], torch.int64)  # (N, P, 2), x and y, -1 on padding
        pixels = as_tensor(features["pixel_values"], torch.float32)  # (N, P, 3 p^2)
        return {"pixel_values": pixels[places[..., 0] >= 0], "image_grids": places.amax(dim=1).flip(-1) + 1}

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that images give."""
        patches = int(media["image_grids"].prod(dim=1).sum()) if media else 0
        return {self.tokenizer.image_token: patches // self._patches_per_token}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Patches of each image."""
        return {"vision": media["image_grids"].prod(dim=1).tolist() if media else []}

    @property
    def _patches_per_token(self) -> int:
        """Patches that are pooled to one embedding."""
        return int(self.hf.image_processor.pooling_kernel_size) ** 2

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text with the beginning and the end of each image."""
        token, count = self.tokenizer.image_token, len(headers.images)
        if text.count(token) != count:
            return None
        written = text.replace(token, f"{self.tokenizer.boi_token}{self.tokenizer.eoi_token}")
        sizes = [list(size) for size in headers.images]
        tokens = self.hf._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"] if count else []
        return Sketch(written, sum(tokens), {"vision": [each * self._patches_per_token for each in tokens]})


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Gemma4Processor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    arch = arch_config if isinstance(arch_config, dict) else arch_config.to_dict()
    vision = Gemma4Config.from_arch(arch).vision
    if source is None:
        return Gemma4Processor(_make(vision))
    wanted = {
        "image_processor.patch_size": vision.patch_size,
        "image_processor.pooling_kernel_size": vision.pooling_kernel_size,
    }
    return Gemma4Processor(load_processor(source, "Gemma4Processor", wanted))


def _make(vision: PretrainedConfig) -> ProcessorMixin:
    """A processor of the bundled tokenizer, for patches of that tower."""
    from transformers import AutoTokenizer, Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4VideoProcessor
    from transformers import Gemma4Processor as Processor

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER, extra_special_tokens=TINY_TOKENS)
    sizes = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
    images = Gemma4ImageProcessor(**sizes, max_soft_tokens=70)
    videos = Gemma4VideoProcessor(**sizes, max_soft_tokens=70)
    around = "".join(TINY_TOKENS[name] for name in ("boi_token", "image_token", "eoi_token"))
    template = tokenizer.chat_template.replace(around, TINY_TOKENS["image_token"])
    return Processor(
        Gemma4AudioFeatureExtractor(), images, tokenizer, videos, chat_template=template, image_seq_length=70
    )
