"""GLM-4.5V's processor: images, and videos as frames that look like images, each before its time.

The tokens of a video are `<|begin_of_video|>`, for each temporal patch `<|begin_of_image|>...<|end_of_image|>` and its
second, `<|end_of_video|>`. Media tensors are those of `zoo.data.processors.vision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import ClipSize, Headers
from zoo.data.processors import vision
from zoo.data.processors.answers import ChatMarkers
from zoo.data.processors.fitting import Sketch
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

KINDS = ("Glm4vProcessor", "Glm46VProcessor")
MARKERS = ChatMarkers("<|assistant|>", "<|user|>", ("<|observation|>", "<|system|>"))
AROUND = {  # config key -> the token
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
# For the processor without published files: least and most tokens of a whole video, and how turns are written.
TINY_VIDEO_TOKENS = (1, 4096)
TINY_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' ~ ('observation' if message.role == 'tool' else message.role) ~ '|>\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- '<|begin_of_' ~ part.type ~ '|><|' ~ part.type ~ '_pad|><|end_of_' ~ part.type ~ '|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> GLM45VProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    geometry = vision.vision_geometry(vision.config_field(arch_config, "vision_config"))
    if source is None:
        return GLM45VProcessor(_make(geometry))
    return GLM45VProcessor(vision.load_processor(source, KINDS, vision.wanted_geometry(geometry)))


class GLM45VProcessor(vision.PatchProcessor):
    """`Processor` around transformers' Glm4vProcessor or Glm46VProcessor: text, images, videos.

    Both count an image's pixels once for each frame of a temporal patch, and a video's of all frames.
    """

    def __init__(self, hf: ProcessorMixin) -> None:
        ids = {key: hf.tokenizer.convert_tokens_to_ids(token) for key, token in AROUND.items()}
        media = {"image_token_id": hf.image_token_id, "video_token_id": hf.video_token_id}
        super().__init__(hf, media | ids, MARKERS)
        self._counted = hf.image_processor.temporal_patch_size  # times that an image's pixels count

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """Frames are taken as they are; their times follow from their pace."""
        if not row.videos:
            return {}
        return {"videos_kwargs": vision.frames_as_they_are(self.hf, media.arguments["videos"], media.paces)}

    def pixel_options(self, pixels: PixelLimits) -> dict[str, JsonObject]:
        """Sizes of images and of videos."""
        return super().pixel_options(self._as_counted(pixels))

    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]:
        """The fewest pixels of an image, and of all frames of a video."""
        image, video = super().least_pixels(self._as_counted(pixels))
        return -(-image // self._counted), video

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of all frames of a video."""
        area = self.hf.image_processor.patch_size**2
        return (
            max((h * w * area for _, h, w in self.image_grids(headers, pixels)), default=0),
            max((t * self._counted * h * w * area for t, h, w in self.video_grids(headers, pixels)), default=0),
        )

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the tower's outputs replace: those of images, for frames too."""
        return {self.hf.image_token: sum(vision.vision_tokens(self.hf, media).values())}

    def model_inputs(self, row: Row, features: JsonObject) -> JsonObject:
        """As the processor gives them; of a row with images and videos, which transformers' model refuses, all are images.

        A frame is to that model what an image of its size is.
        """
        if not (row.images and row.videos):
            return features
        kinds = features["mm_token_type_ids"]
        left = {1: _pictures(features, "pixel_values", "image_grid_thw")}
        left[2] = _pictures(features, "pixel_values_videos", "video_grid_thw")
        pictures = [next(left[kind]) for kind, _ in groupby(kinds[0].tolist()) if kind]
        pixels, grids = zip(*pictures, strict=True)
        kept = {key: x for key, x in features.items() if key not in ("pixel_values_videos", "video_grid_thw")}
        return kept | {
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.stack(grids),
            "mm_token_type_ids": kinds.clamp(max=1),
        }

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """One token for each image and each temporal patch, with the times as transformers writes them."""
        images, videos = self.image_grids(headers, pixels), self.video_grids(headers, pixels)
        merge = self.hf.video_processor.merge_size
        # Grids of one token a frame, of which transformers makes its text.
        small = {
            "video_grid_thw": [torch.tensor((time, merge, merge)) for time, *_ in videos],
            "video_metadata": [
                SimpleNamespace(
                    fps=pace.fps, timestamps=[frame / pace.fps for frame in vision.frame_places(clip.frames, pace)]
                )
                for clip, pace in zip(headers.videos, headers.paces, strict=True)
            ],
        }
        written = [self.hf.replace_video_token(small, index) for index in range(len(videos))]
        (text,), _ = self.hf.get_text_with_replacements([text], [self.hf.image_token] * len(images), written)
        rows = vision.grid_rows([*images, *videos])
        return Sketch(text, sum(count // merge**2 - 1 for count in rows), {"vision": rows})

    def usual_image(self, size: Sequence[int], pixels: PixelLimits) -> tuple[int, int]:
        """(height, width) of a resized image without settings of its own."""
        pixels = self._as_counted(pixels)
        limits = vision.pixel_limits(self.hf.image_processor.size, pixels.least, pixels.most)
        return self._resized((self._counted, *size), limits)

    def usual_video(self, clip: ClipSize, pixels: PixelLimits) -> tuple[int, int]:
        """(height, width) of the resized frames of a video, whose limits are those of all frames together."""
        return self._resized(clip, vision.pixel_limits(self.frame_size, None, pixels.video_most))

    def image_limits(self, least: int | None, most: int | None) -> tuple[int, int]:
        """Least and most pixels of an image, each counted once."""
        counted = self._as_counted(PixelLimits(least, most))
        low, high = vision.pixel_limits(self.hf.image_processor.size, counted.least, counted.most).values()
        return -(-low // self._counted), high // self._counted

    def frame_limits(self, clip: ClipSize, most: int | None) -> tuple[int, int]:
        """Least and most pixels of a frame: a share of those of all frames together."""
        limits = vision.pixel_limits(self.frame_size, None, most)
        return vision.limits_of_each(limits, clip.frames, self.hf.video_processor.temporal_patch_size)

    def _as_counted(self, pixels: PixelLimits) -> PixelLimits:
        """Limits of an image's pixels as transformers' processor counts them."""
        least, most = (limit if limit is None else limit * self._counted for limit in (pixels.least, pixels.most))
        return replace(pixels, least=least, most=most)

    def _resized(self, size: Sequence[int], limits: Mapping[str, int]) -> tuple[int, int]:
        """(height, width) of so many frames, of (height, width) pixels, once resized."""
        from transformers.models.glm4v.image_processing_glm4v import smart_resize

        images = self.hf.image_processor
        patch, together = images.patch_size, images.temporal_patch_size
        height, width = smart_resize(
            *size, together, patch * images.merge_size, limits["shortest_edge"], limits["longest_edge"]
        )
        return int(height), int(width)


def _pictures(features: JsonMapping, pixels: str, grids: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(patches, grid (3,)) of each image or frame."""
    frames = features[grids].repeat_interleave(features[grids][:, 0], dim=0)
    frames[:, 0] = 1
    yield from zip(features[pixels].split(frames.prod(1).tolist()), frames, strict=True)


def _make(geometry: dict[str, int]) -> ProcessorMixin:
    from transformers import AutoTokenizer, Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    turns = (MARKERS.header, MARKERS.end, *MARKERS.further_ends)
    tokenizer.add_tokens([*turns, *AROUND.values()], special_tokens=True)
    least, most = vision.TINY_IMAGE_TOKENS
    together = geometry["temporal_patch_size"]
    images = vision.tiny_settings(geometry, (least * together, most * together))
    return Glm4vProcessor(
        image_processor=Glm4vImageProcessor(**images),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(
            do_sample_frames=False, **vision.tiny_settings(geometry, TINY_VIDEO_TOKENS)
        ),
        chat_template=TINY_TEMPLATE,
    )
