"""What processors of images and videos in patches share: geometry, a processor's files, media tensors and their tokens.

Media tensors of a sample (each joined along dim 0 over samples): pixel_values (P, C * tp * p * p) float32 and
image_grid_thw (n, 3) int64, in patches; pixel_values_videos and video_grid_thw likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.config.checks.media_sizes import check_media_sizes
from zoo.config.entries import PixelLimits
from zoo.config.locate import load_from_folder
from zoo.data.media.sampling import Pace
from zoo.data.media.sizes import ClipSize, Headers
from zoo.data.processors.answers import CHATML, ChatMarkers
from zoo.data.processors.boxes import Size
from zoo.data.processors.processor import ArchConfig, CallArguments, Features, Processor, as_tensor
from zoo.data.sources.formats.media_settings import MediaSettings
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

MARKERS = CHATML
type Grid = tuple[int, int, int]  # time, height and width in patches
PARTS = ("image_processor", "video_processor")
LEAST_TOKENS, MOST_TOKENS = (4, 16384)  # between which qwen-vl-utils keeps an image or frame whose pixels a row gives
TINY_IMAGE_TOKENS = (1, 512)  # least and most tokens of an image, for the processor without published files


def config_field(config: ArchConfig, name: str, default: object = None) -> Any:
    """A field of an architecture, a dict or a config object; ConfigError where it has none and there is no default."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"model.arch has no {name!r}; give it as the family's published Hugging Face configs do.")
    return value


def vision_geometry(vision_config: ArchConfig) -> dict[str, int]:
    """patch_size, merge_size and temporal_patch_size of a vision tower, by the image processors' names."""
    keys = {
        "patch_size": "patch_size",
        "merge_size": "spatial_merge_size",
        "temporal_patch_size": "temporal_patch_size",
    }
    return {name: config_field(vision_config, key) for name, key in keys.items()}


def load_processor(source: str, kind: str | tuple[str, ...], wanted: Mapping[str, object]) -> ProcessorMixin:
    """The Hugging Face processor of a folder.

    Args:
        source: the folder.
        kind: name of the processor's class, or names that it may have.
        wanted: what the architecture asks of the processor: {"image_processor.patch_size": 16}.

    Raises:
        ConfigError: no processor in `source`, one of another class, or one that doesn't fit.
    """
    from transformers import AutoProcessor

    files = "preprocessor_config.json (or processor_config.json), the tokenizer's files and the chat template"
    # Code that a folder brings along (auto_map) is never run, and nobody is asked whether it may be.
    hf = load_from_folder(
        source, "processor", files, lambda: AutoProcessor.from_pretrained(source, trust_remote_code=False)
    )
    kinds = (kind,) if isinstance(kind, str) else kind
    if type(hf).__name__ not in kinds:
        raise ConfigError(f"model.init: {source} has a {type(hf).__name__}; a {' or '.join(kinds)} is wanted.")
    for part in PARTS:
        made = getattr(hf, part, None)
        size = getattr(made, "size", None)
        if made is not None and not hasattr(made, "merge_size") and size is not None:  # sizes are sides of images
            check_media_sizes({"size": {"shortest_edge": size.get("shortest_edge")}}, f"model.init: {source}")
    for name, value in wanted.items():
        part, _, attribute = name.partition(".")
        seen = getattr(getattr(hf, part), attribute)
        if seen != value:
            raise ConfigError(f"model.init: {name} of {source} is {seen}, but the architecture wants {value}.")
    return hf


def wanted_geometry(geometry: Mapping[str, int]) -> dict[str, int]:
    """A geometry as `load_processor` wants it, of images and of videos."""
    return {f"{part}.{name}": value for part in PARTS for name, value in geometry.items()}


def tiny_settings(geometry: Mapping[str, int], tokens: tuple[int, int]) -> CallArguments:
    """Arguments of an image or video processor whose least and most `tokens` are those, of 32 x 32 pixels, say."""
    unit = (geometry["patch_size"] * geometry["merge_size"]) ** 2  # pixels of a token
    size = {"shortest_edge": tokens[0] * unit, "longest_edge": tokens[1] * unit}
    return {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **geometry}


def tiny_parts(geometry: Mapping[str, int]) -> CallArguments:
    """Image processor, tokenizer and chat template of a processor without published files."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    return {
        "image_processor": Qwen2VLImageProcessor(**tiny_settings(geometry, TINY_IMAGE_TOKENS)),
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
    }


def vision_tensors(features: Features) -> dict[str, Tensor]:
    """The vision tower's tensors out of a Hugging Face processor's result; see the module's docstring."""
    dtypes = dict.fromkeys(("pixel_values", "pixel_values_videos"), torch.float32)
    dtypes |= dict.fromkeys(("image_grid_thw", "video_grid_thw"), torch.int64)
    return {name: as_tensor(features[name], dtype) for name, dtype in dtypes.items() if name in features}


def vision_tokens(hf: ProcessorMixin, media: Mapping[str, Tensor]) -> dict[str, int]:
    """Placeholder tokens that the vision tower's outputs replace."""
    merged = hf.image_processor.merge_size**2
    names = {hf.image_token: "image_grid_thw", hf.video_token: "video_grid_thw"}
    return {token: int(media[name].prod(-1).sum()) // merged if name in media else 0 for token, name in names.items()}


def vision_rows(media: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Patches of each image and of each temporal patch of a video, which a vision tower sees by itself."""
    grids = [grid for name in ("image_grid_thw", "video_grid_thw") if name in media for grid in media[name].tolist()]
    return {"vision": grid_rows(grids)}


def grid_rows(grids: Sequence[Sequence[int]]) -> list[int]:
    """Patches of each temporal patch of grids, which are (time, height, width) in patches."""
    return [height * width for time, height, width in grids for _ in range(time)]


def pixel_limits(size: Mapping[str, int], least: int | None, most: int | None) -> dict[str, int]:
    """An image or video processor's `size` with other limits of pixels; what is given stands before the processor's own.

    transformers' own processors take both limits in a call, or neither.
    """
    low, high = size["shortest_edge"], size["longest_edge"]
    low = least if least is not None else low if most is None else min(low, most)
    high = most if most is not None else max(low, high)
    return {"shortest_edge": low, "longest_edge": high}


def frames_as_they_are(hf: ProcessorMixin, videos: Sequence[Tensor], paces: Sequence[Pace]) -> CallArguments:
    """`videos_kwargs` of a call whose frames are all taken; when each was shown follows from their pace."""
    shown = [
        {"total_num_frames": len(frames), "fps": pace.fps, "frames_indices": frame_places(len(frames), pace)}
        for frames, pace in zip(videos, paces, strict=True)
    ]
    # Of a processor that has no such setting yet: what it does today (without a warning that it may change).
    unset = getattr(hf.video_processor, "cap_pixels_per_frame", False) is None
    options = {"cap_pixels_per_frame": False} if unset else {}
    return {"do_sample_frames": False, "video_metadata": shown, **options}


def limits_of_each(limits: Mapping[str, int], frames: int, together: int) -> tuple[int, int]:
    """Least and most pixels of a frame, where `limits` are those of all frames, filled up to temporal patches of `together`."""
    count = -(-frames // together) * together
    return -(-limits["shortest_edge"] // count), limits["longest_edge"] // count


def frame_places(count: int, pace: Pace) -> list[float]:
    """The places of a clip's frames in its video, counted at the clip's rate."""
    return [pace.start * pace.fps + number for number in range(count)] if pace.start else list(range(count))


def _resized(resized: Any, media: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Images or clips, each (..., 3, H, W) uint8, at the pixels of their grids, as transformers' processor `resized` resizes."""
    from torchvision.transforms.v2 import functional as tvf
    from transformers.image_utils import pil_torch_interpolation_mapping

    mode, patch = pil_torch_interpolation_mapping.get(resized.resample, resized.resample), resized.patch_size
    sizes = [[height * patch, width * patch] for _, height, width in grids]
    return [tvf.resize(x, size, interpolation=mode, antialias=True) for x, size in zip(media, sizes, strict=True)]


def _capped(low: int, high: int, cap: int | None) -> tuple[int, int]:
    high = high if cap is None else min(high, cap)
    return min(low, high), high


class PatchProcessor(Processor):
    """`Processor` of images and videos in patches.

    Args:
        hf: transformers' processor.
        token_ids: config key -> id of the tokens around and in the place of media.
        markers: how its chat template writes an assistant's turn.

    Attributes:
        frame_size: limits of pixels of a video, as its processor counts them.
    """

    modalities: tuple[str, ...] = ("text", "image", "video")

    def __init__(self, hf: ProcessorMixin, token_ids: Mapping[str, int], markers: ChatMarkers = MARKERS) -> None:
        super().__init__(hf, markers)
        self.token_ids = dict(token_ids)
        self.frame_size: Mapping[str, int] = hf.video_processor.size
        self.pixels_of_token = (hf.image_processor.patch_size * hf.image_processor.merge_size) ** 2

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of all tokens in `token_ids`."""
        return frozenset(self.token_ids.values())

    def pixel_options(self, pixels: PixelLimits) -> dict[str, CallArguments]:
        """Sizes of images and of videos."""
        options: dict[str, CallArguments] = {}
        if pixels.least is not None or pixels.most is not None:
            size = pixel_limits(self.hf.image_processor.size, pixels.least, pixels.most)
            options["images_kwargs"] = {"size": size}
        if pixels.video_most is not None:
            options["videos_kwargs"] = {"size": pixel_limits(self.frame_size, None, pixels.video_most)}
        return options

    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]:
        """The fewest pixels of an image, and of a video as its limits count."""
        return pixels.least or self.hf.image_processor.size["shortest_edge"], self.frame_size["shortest_edge"]

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of a frame."""
        area = self.hf.image_processor.patch_size**2
        image, video = (
            max((height * width * area for _, height, width in grids), default=0)
            for grids in (self.image_grids(headers, pixels), self.video_grids(headers, pixels))
        )
        return image, video

    def image_grids(self, headers: Headers, pixels: PixelLimits) -> list[Grid]:
        """(1, height, width) in patches of each image."""
        patch, grids = self.hf.image_processor.patch_size, []
        for size, settings in headers.sized_images():
            if settings is None:
                height, width = self.usual_image(size, pixels)
            else:
                limits = self.image_limits(settings.min_pixels or pixels.least, settings.max_pixels or pixels.most)
                limits = _capped(*limits, pixels.most if headers.capped else None)
                height, width = self._own_size(size, settings, limits, headers.capped)
            grids.append((1, height // patch, width // patch))
        return grids

    def video_grids(self, headers: Headers, pixels: PixelLimits) -> list[Grid]:
        """(time, height, width) in patches of each video."""
        patch, together = self.hf.video_processor.patch_size, self.hf.video_processor.temporal_patch_size
        grids = []
        for clip, settings in headers.sized_videos():
            count, *size = clip
            if settings is None:
                height, width = self.usual_video(clip, pixels)
            else:
                limits = self._limits_of_frame(clip, settings, headers, pixels)
                height, width = self._own_size(size, settings, limits, headers.capped)
            grids.append((-(-count // together), height // patch, width // patch))
        return grids

    def own_sizes(self, media: Mapping[str, list], headers: Headers, pixels: PixelLimits) -> CallArguments:
        """Images and videos, all resized where some have settings of their own, which a call has no arguments for."""
        arguments: CallArguments = {}
        if any(settings for _, settings in headers.sized_images()):
            images = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in media["images"]]
            arguments["images"] = _resized(self.hf.image_processor, images, self.image_grids(headers, pixels))
        if any(settings for _, settings in headers.sized_videos()):
            arguments["videos"] = _resized(self.hf.video_processor, media["videos"], self.video_grids(headers, pixels))
        return arguments

    def image_sizes(self, headers: Headers, pixels: PixelLimits) -> list[Size]:
        """(height, width) of a row's images as the tower reads them."""
        patch = self.hf.image_processor.patch_size
        return [(height * patch, width * patch) for _, height, width in self.image_grids(headers, pixels)]

    def usual_image(self, size: Sequence[int], pixels: PixelLimits) -> tuple[int, int]:
        """(height, width) of a resized image without settings of its own."""
        return self._fitted(size, *self.image_limits(pixels.least, pixels.most))

    def usual_video(self, clip: ClipSize, pixels: PixelLimits) -> tuple[int, int]:
        """(height, width) of the resized frames of a video without settings of its own; here its limits are those of a frame."""
        return self._fitted(clip[1:], *self.frame_limits(clip, pixels.video_most))

    def image_limits(self, least: int | None, most: int | None) -> tuple[int, int]:
        """Least and most pixels of an image, under those that are given."""
        low, high = pixel_limits(self.hf.image_processor.size, least, most).values()
        return low, high

    def frame_limits(self, clip: ClipSize, most: int | None) -> tuple[int, int]:
        """Least and most pixels of a video's frame; `most` is data.video_max_pixels, counted as the family does."""
        low, high = pixel_limits(self.frame_size, None, most).values()
        return low, high

    def _limits_of_frame(
        self, clip: ClipSize, settings: MediaSettings, headers: Headers, pixels: PixelLimits
    ) -> tuple[int, int]:
        """Least and most pixels of a frame of a video with settings of its own, as qwen-vl-utils reads them."""
        low, high = self.frame_limits(clip, pixels.video_most)
        low, high = settings.min_pixels or low, settings.max_pixels or high
        if settings.total_pixels is not None:
            patches = -(-clip.frames // self.hf.video_processor.temporal_patch_size)
            high = min(high, settings.total_pixels // patches)
        high = high if settings.min_pixels is None else max(high, low)
        cap = self.frame_limits(clip, pixels.video_most)[1] if headers.capped else None
        return _capped(min(low, high), high, cap)

    def _own_size(
        self, size: Sequence[int], settings: MediaSettings, limits: tuple[int, int], capped: bool
    ) -> tuple[int, int]:
        """(height, width) of a resized image or frame with settings of its own."""
        if settings.resized_height is None or settings.resized_width is None:
            return self._fitted(size, *limits)
        least, most = LEAST_TOKENS * self.pixels_of_token, MOST_TOKENS * self.pixels_of_token
        size = settings.resized_height, settings.resized_width
        return self._fitted(size, *_capped(least, most, limits[1] if capped else None))

    def _fitted(self, size: Sequence[int], least: int, most: int) -> tuple[int, int]:
        """(height, width) in whole tokens, within limits of pixels."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        images = self.hf.image_processor
        height, width = smart_resize(*size, images.patch_size * images.merge_size, least, most)
        return int(height), int(width)

    def media_tensors(self, features: Features) -> dict[str, Tensor]:
        """Input tensors of the vision tower, by name."""
        return vision_tensors(features)

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the tower's outputs replace."""
        return vision_tokens(self.hf, media)

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Patches of each image and temporal patch."""
        return vision_rows(media)
