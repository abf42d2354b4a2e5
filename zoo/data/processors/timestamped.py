"""Processor of families that write a video as frames behind timestamps: transformers' Qwen3VLProcessor.

The tokens of a video are `<0.2 seconds><|vision_start|>...<|vision_end|>`, once for each temporal patch, with the time
in the middle of its frames. Media tensors are those of `zoo.data.processors.vision`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import ClipSize, Headers
from zoo.data.processors import vision
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import ArchConfig, CallArguments
from zoo.data.sources.rows import Row

if TYPE_CHECKING:
    from transformers import ProcessorMixin

KIND = "Qwen3VLProcessor"
TINY_VIDEO_TOKENS = (1, 4096)  # least and most tokens of a whole video: its size counts pixels of all frames
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class TimestampedProcessor(vision.PatchProcessor):
    """`Processor` around transformers' Qwen3VLProcessor: text, images, videos."""

    def __init__(self, hf: ProcessorMixin) -> None:
        super().__init__(hf, {name: getattr(hf, name) for name in TOKENS})

    @classmethod
    def build(cls, arch_config: ArchConfig, source: str | None = None) -> TimestampedProcessor:
        """The processor of a run.

        Args:
            arch_config: the architecture as Hugging Face writes it, a dict or a config object.
            source: a Hugging Face folder with the processor's files; None makes one from the bundled tokenizer, whose
                smallest picture, of 2 x 2 patches, say, is one token.

        Raises:
            ConfigError: no processor in `source`, one of another family, or one that doesn't fit the architecture.
        """
        geometry = vision.vision_geometry(vision.config_field(arch_config, "vision_config"))
        if source is None:
            from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

            options = {"do_sample_frames": False, "cap_pixels_per_frame": False}
            video = Qwen3VLVideoProcessor(**options, **vision.tiny_settings(geometry, TINY_VIDEO_TOKENS))
            return cls(Qwen3VLProcessor(video_processor=video, **vision.tiny_parts(geometry)))
        return cls(vision.load_processor(source, KIND, vision.wanted_geometry(geometry)))

    def call_options(self, row: Row, media: LoadedMedia) -> CallArguments:
        """Frames are taken as they are; their times follow from their pace."""
        if not row.videos:
            return {}
        return {"videos_kwargs": vision.frames_as_they_are(self.hf, media.arguments["videos"], media.paces)}

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of all frames of a video."""
        image, _ = super().most_pixels(headers, pixels)
        patches = max((t * h * w for t, h, w in self.video_grids(headers, pixels)), default=0)
        return image, patches * self.hf.image_processor.patch_size**2 * self.hf.video_processor.temporal_patch_size

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """One token for each image and each temporal patch, behind the timestamps as transformers writes them."""
        if headers.videos and self.hf.video_processor.cap_pixels_per_frame:
            return None
        images = self.image_grids(headers, pixels)
        videos = self.video_grids(headers, pixels)
        merge = self.hf.video_processor.merge_size
        times = [
            SimpleNamespace(fps=pace.fps, frames_indices=vision.frame_places(clip.frames, pace))
            for clip, pace in zip(headers.videos, headers.paces, strict=True)
        ]
        # Grids of one token each, of which transformers makes its text.
        small = {"video_grid_thw": [torch.tensor((grid[0], merge, merge)) for grid in videos], "video_metadata": times}
        written = [self.hf.replace_video_token(small, index) for index in range(len(videos))]
        (text,), _ = self.hf.get_text_with_replacements([text], [self.hf.image_token] * len(images), written)
        rows = vision.grid_rows([*images, *videos])
        return Sketch(text, sum(count // merge**2 - 1 for count in rows), {"vision": rows})

    def usual_video(self, clip: ClipSize, pixels: PixelLimits) -> tuple[int, int]:
        """(height, width) of the resized frames of a video, whose limits are those of all frames together."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        videos = self.hf.video_processor
        bounds = vision.pixel_limits(self.frame_size, None, pixels.video_most)
        units = (videos.temporal_patch_size, videos.patch_size * videos.merge_size)
        height, width = smart_resize(*clip, *units, bounds["shortest_edge"], bounds["longest_edge"])
        return int(height), int(width)

    def frame_limits(self, clip: ClipSize, most: int | None) -> tuple[int, int]:
        """Least and most pixels of a frame: a share of those of all frames together."""
        together = self.hf.video_processor.temporal_patch_size
        return vision.limits_of_each(vision.pixel_limits(self.frame_size, None, most), clip.frames, together)
