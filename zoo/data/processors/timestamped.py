"""Processor of families that write a video as frames behind timestamps: transformers' Qwen3VLProcessor.

The tokens of a video are `<0.2 seconds><|vision_start|>...<|vision_end|>`, once for each temporal patch, with the time
in the middle of its frames. Media tensors are those of `zoo.data.processors.vision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from zoo.config.entries import PixelLimits
from zoo.data.media.sizes import Headers
from zoo.data.processors.processor import Sketch
from zoo.data.processors.vision import (
    PatchProcessor,
    config_field,
    frames_as_they_are,
    grid_rows,
    image_grids,
    load_processor,
    pixel_limits,
    tiny_parts,
    tiny_settings,
    vision_geometry,
    wanted_geometry,
)
from zoo.data.sources.rows import Row

KIND = "Qwen3VLProcessor"
TINY_VIDEO_TOKENS = (1, 4096)  # least and most tokens of a whole video: its size counts pixels of all frames
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class TimestampedProcessor(PatchProcessor):
    """`Processor` around transformers' Qwen3VLProcessor: text, images, videos."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf, {name: getattr(hf, name) for name in TOKENS})

    @classmethod
    def build(cls, arch_config: Any, source: str | None = None) -> TimestampedProcessor:
        """The processor of a run.

        Args:
            arch_config: the architecture as Hugging Face writes it, a dict or a config object.
            source: a Hugging Face folder with the processor's files; None makes one from the bundled tokenizer, whose
                smallest picture, of 2 x 2 patches, say, is one token.

        Raises:
            ConfigError: no processor in `source`, one of another family, or one that doesn't fit the architecture.
        """
        geometry = vision_geometry(config_field(arch_config, "vision_config"))
        if source is None:
            return cls(_make(geometry))
        return cls(load_processor(source, KIND, wanted_geometry(geometry)))

    def call_options(self, row: Row, media: Mapping[str, list], fps: float | None) -> dict[str, Any]:
        """Frames are taken as they are; their times follow from their rate."""
        return {"videos_kwargs": frames_as_they_are(self.hf, media["videos"], fps)} if row.videos else {}

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of all frames of a video."""
        area, together = self.hf.image_processor.patch_size**2, self.hf.video_processor.temporal_patch_size
        images = image_grids(self.hf, headers.images, pixels)
        return (
            max((height * width * area for _, height, width in images), default=0),
            max((t * together * h * w * area for t, h, w in self.video_grids(headers, pixels)), default=0),
        )

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """One token for each image and each temporal patch, behind the timestamps as transformers writes them."""
        if headers.videos and self.hf.video_processor.cap_pixels_per_frame:
            return None
        images = image_grids(self.hf, headers.images, pixels)
        videos = self.video_grids(headers, pixels)
        merge = self.hf.video_processor.merge_size
        times = [
            SimpleNamespace(fps=headers.fps, frames_indices=list(range(count)))
            for count, *_ in headers.videos
        ]
        # Grids of one token each, of which transformers makes its text.
        small = {
            "video_grid_thw": [torch.tensor((grid[0], merge, merge)) for grid in videos],
            "video_metadata": times,
        }
        written = [self.hf.replace_video_token(small, index) for index in range(len(videos))]
        (text,), _ = self.hf.get_text_with_replacements([text], [self.hf.image_token] * len(images), written)
        rows = grid_rows([*images, *videos])
        return Sketch(text, sum(count // merge**2 - 1 for count in rows), {"vision": rows})

    def video_grids(self, headers: Headers, pixels: PixelLimits) -> list[tuple[int, int, int]]:
        """(time, height, width) in patches of each video."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        videos = self.hf.video_processor
        patch, together = videos.patch_size, videos.temporal_patch_size
        bounds = pixel_limits(self.frame_size, None, pixels.video_most)
        limits = (together, patch * videos.merge_size, bounds["shortest_edge"], bounds["longest_edge"])
        grids = []
        for count, *size in headers.videos:
            height, width = smart_resize(count, *size, *limits)
            grids.append((-(-count // together), height // patch, width // patch))
        return grids


def _make(geometry: dict[str, int]) -> Any:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    video = Qwen3VLVideoProcessor(
        do_sample_frames=False, cap_pixels_per_frame=False, **tiny_settings(geometry, TINY_VIDEO_TOKENS)
    )
    return Qwen3VLProcessor(video_processor=video, **tiny_parts(geometry))
