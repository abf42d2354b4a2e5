"""Qwen2.5-VL's processor: images, and videos as a whole, with the seconds from one temporal patch to the next.

Media tensors of a sample (each joined along dim 0 over samples), beside those of `zoo.data.processors.vision`:
    second_per_grid_ts (n,) float32, seconds of a temporal patch of each video.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors import vision
from zoo.data.processors.boxes import Coordinates
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import as_tensor
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

# Config key -> the token, which the published tokenizer has no attributes for.
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Least and most tokens of a video's frame, for the processor without published files.
TINY_FRAME_TOKENS = (1, 256)


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Qwen25VLProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    geometry = vision.vision_geometry(vision.config_field(arch_config, "vision_config"))
    if source is None:
        return Qwen25VLProcessor(_make(geometry))
    return Qwen25VLProcessor(vision.load_processor(source, "Qwen2_5_VLProcessor", vision.wanted_geometry(geometry)))


class Qwen25VLProcessor(vision.PatchProcessor):
    """`Processor` around transformers' Qwen2_5_VLProcessor: text, images, videos."""

    def __init__(self, hf: ProcessorMixin) -> None:
        ids = {key: hf.tokenizer.convert_tokens_to_ids(token) for key, token in TOKENS.items()}
        super().__init__(hf, ids)

    coordinates = Coordinates("pixels")  # of the resized image (Qwen2.5-VL's report, 2.1.1)

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """Frames are taken as they are; the seconds between them follow from their pace."""
        videos = media.arguments.get("videos")
        return {"videos_kwargs": vision.frames_as_they_are(self.hf, videos, media.paces)} if videos else {}

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The vision tower's tensors, and the clock of the videos."""
        media = vision.vision_tensors(features)
        if "second_per_grid_ts" in features:
            media["second_per_grid_ts"] = as_tensor(features["second_per_grid_ts"], torch.float32)
        return media

    def incomparable(self, sample: Sample) -> str | None:
        """Videos with a part of a second between temporal patches, where transformers drops that part (before 5.18)."""
        import transformers
        from packaging.version import Version

        seconds = sample.media.get("second_per_grid_ts")
        drops_parts = Version(transformers.__version__) < Version("5.18")
        if seconds is None or bool((seconds == seconds.floor()).all()) or not drops_parts:
            return None
        return "videos with a part of a second between temporal patches, which transformers before 5.18 drops"

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text: a token for each medium."""
        if headers.videos and self.hf.video_processor.cap_pixels_per_frame:
            return None
        grids = [*self.image_grids(headers, pixels), *self.video_grids(headers, pixels)]
        merged = self.hf.image_processor.merge_size**2
        tokens = sum(time * height * width // merged for time, height, width in grids)
        return Sketch(text, tokens - len(grids), {"vision": vision.grid_rows(grids)})


def _make(geometry: dict[str, int]) -> ProcessorMixin:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    video = Qwen2VLVideoProcessor(
        do_sample_frames=False, cap_pixels_per_frame=False, **vision.tiny_settings(geometry, TINY_FRAME_TOKENS)
    )
    return Qwen2_5_VLProcessor(video_processor=video, **vision.tiny_parts(geometry))
