"""What processors of images and videos in patches share: geometry, a processor's files, media tensors and their tokens.

Media tensors of a sample (each joined along dim 0 over samples): pixel_values (P, C * tp * p * p) float32 and
image_grid_thw (n, 3) int64, in patches; pixel_values_videos and video_grid_thw likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.config.locate import check_side_files
from zoo.data.media.sizes import Headers
from zoo.data.processors.answers import CHATML, ChatMarkers
from zoo.data.processors.processor import Processor, as_tensor
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.errors import ConfigError, printable

MARKERS = CHATML
PARTS = ("image_processor", "video_processor")
TINY_IMAGE_TOKENS = (1, 512)  # least and most tokens of an image, for the processor without published files


def config_field(config: Any, name: str, default: Any = None) -> Any:
    """A field of an architecture, a dict or a config object; ConfigError where it has none and there is no default."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    value = default if value is None else value
    if value is None:
        raise ConfigError(
            f"model.arch has no {name!r}; give it as the family's published Hugging Face configs do."
        )
    return value


def vision_geometry(vision_config: Any) -> dict[str, int]:
    """patch_size, merge_size and temporal_patch_size of a vision tower, by the image processors' names."""
    return {
        "patch_size": config_field(vision_config, "patch_size"),
        "merge_size": config_field(vision_config, "spatial_merge_size"),
        "temporal_patch_size": config_field(vision_config, "temporal_patch_size"),
    }


def load_processor(source: str, kind: str | tuple[str, ...], wanted: Mapping[str, Any]) -> Any:
    """The Hugging Face processor of a folder.

    Args:
        source: the folder.
        kind: name of the processor's class, or names that it may have.
        wanted: what the architecture asks of the processor: {"image_processor.patch_size": 16}.

    Raises:
        ConfigError: no processor in `source`, one of another class, or one that doesn't fit.
    """
    from transformers import AutoProcessor

    try:
        check_side_files(source)
        # Code that a folder brings along (auto_map) is never run, and nobody is asked whether it may be.
        hf = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what lies in the folder
        said = printable(" ".join(str(error).split()), 400)
        raise ConfigError(
            f"model.init: no processor can be loaded from {Path(source)}: {said}; its folder should hold "
            "preprocessor_config.json (or processor_config.json), the tokenizer's files and the chat template."
        ) from error
    kinds = (kind,) if isinstance(kind, str) else kind
    if type(hf).__name__ not in kinds:
        raise ConfigError(
            f"model.init: {source} has a {type(hf).__name__}; a {' or '.join(kinds)} is wanted."
        )
    for name, value in wanted.items():
        part, _, attribute = name.partition(".")
        seen = getattr(getattr(hf, part), attribute)
        if seen != value:
            raise ConfigError(
                f"model.init: {name} of {source} is {seen}, but the architecture wants {value}."
            )
    return hf


def wanted_geometry(geometry: Mapping[str, int]) -> dict[str, int]:
    """A geometry as `load_processor` wants it, of images and of videos."""
    return {f"{part}.{name}": value for part in PARTS for name, value in geometry.items()}


def tiny_settings(geometry: Mapping[str, int], tokens: tuple[int, int]) -> dict[str, Any]:
    """Arguments of an image or video processor whose least and most `tokens` are those, of 32 x 32 pixels, say."""
    unit = (geometry["patch_size"] * geometry["merge_size"]) ** 2  # pixels of a token
    size = {"shortest_edge": tokens[0] * unit, "longest_edge": tokens[1] * unit}
    return {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **geometry}


def tiny_parts(geometry: Mapping[str, int]) -> dict[str, Any]:
    """Image processor, tokenizer and chat template of a processor without published files."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    return {
        "image_processor": Qwen2VLImageProcessor(**tiny_settings(geometry, TINY_IMAGE_TOKENS)),
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
    }


def vision_tensors(features: Mapping[str, Any]) -> dict[str, Tensor]:
    """The vision tower's tensors out of a Hugging Face processor's result; see the module's docstring."""
    dtypes = {
        "pixel_values": torch.float32,
        "pixel_values_videos": torch.float32,
        "image_grid_thw": torch.int64,
        "video_grid_thw": torch.int64,
    }
    return {name: as_tensor(features[name], dtype) for name, dtype in dtypes.items() if name in features}


def vision_tokens(hf: Any, media: Mapping[str, Tensor]) -> dict[str, int]:
    """Placeholder tokens that the vision tower's outputs replace."""
    merged = hf.image_processor.merge_size**2
    names = {hf.image_token: "image_grid_thw", hf.video_token: "video_grid_thw"}
    return {
        token: int(media[name].prod(-1).sum()) // merged if name in media else 0
        for token, name in names.items()
    }


def vision_rows(media: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Patches of each image and of each temporal patch of a video, which a vision tower sees by itself."""
    grids = [
        grid
        for name in ("image_grid_thw", "video_grid_thw")
        if name in media
        for grid in media[name].tolist()
    ]
    return {"vision": grid_rows(grids)}


def grid_rows(grids: Sequence[Sequence[int]]) -> list[int]:
    """The same of (time, height, width) in patches."""
    return [height * width for time, height, width in grids for _ in range(time)]


def pixel_limits(size: Any, least: int | None, most: int | None) -> dict[str, int]:
    """An image or video processor's `size` with other limits of pixels; what is given stands before the processor's own.

    transformers' own processors take both limits in a call, or neither.
    """
    low, high = size["shortest_edge"], size["longest_edge"]
    low = least if least is not None else low if most is None else min(low, most)
    high = most if most is not None else max(low, high)
    return {"shortest_edge": low, "longest_edge": high}


def pixel_options(pixels: PixelLimits, images: Any, videos: Any) -> dict[str, dict[str, Any]]:
    """Limits of pixels as arguments of a processor's call; `images` and `videos` are its sizes."""
    options: dict[str, dict[str, Any]] = {}
    if pixels.least is not None or pixels.most is not None:
        options["images_kwargs"] = {"size": pixel_limits(images, pixels.least, pixels.most)}
    if pixels.video_most is not None:
        options["videos_kwargs"] = {"size": pixel_limits(videos, None, pixels.video_most)}
    return options


def image_grids(hf: Any, sizes: Sequence[tuple[int, int]], pixels: PixelLimits) -> list[tuple[int, int, int]]:
    """(1, height, width) in patches of images of (height, width) pixels."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    images = hf.image_processor
    limits = pixel_limits(images.size, pixels.least, pixels.most).values()
    resized = [smart_resize(*size, images.patch_size * images.merge_size, *limits) for size in sizes]
    return [(1, height // images.patch_size, width // images.patch_size) for height, width in resized]


def frame_grids(
    hf: Any, videos: Sequence[Sequence[int]], limits: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """(time, height, width) in patches of videos of (frames, height, width) pixels, where `limits` are those of a frame."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

    made, patch = hf.video_processor, hf.video_processor.patch_size
    grids = []
    for count, *size in videos:
        height, width = smart_resize(
            *size, patch * made.merge_size, limits["shortest_edge"], limits["longest_edge"]
        )
        grids.append((-(-count // made.temporal_patch_size), height // patch, width // patch))
    return grids


def frames_as_they_are(hf: Any, videos: Sequence[Any], fps: float | None) -> dict[str, Any]:
    """`videos_kwargs` of a call whose frames are all taken; when each was shown follows from their rate."""
    times = [
        {"total_num_frames": len(frames), "fps": fps, "frames_indices": list(range(len(frames)))}
        for frames in videos
    ]
    options = {"do_sample_frames": False, "video_metadata": times}
    if getattr(hf.video_processor, "cap_pixels_per_frame", False) is None:
        options["cap_pixels_per_frame"] = False  # what it does today (without a warning that it may change)
    return options


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

    def __init__(self, hf: Any, token_ids: Mapping[str, int], markers: ChatMarkers = MARKERS) -> None:
        super().__init__(hf, markers)
        self.token_ids = dict(token_ids)
        self.frame_size: Any = hf.video_processor.size
        self.pixels_of_token = (hf.image_processor.patch_size * hf.image_processor.merge_size) ** 2

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of those tokens."""
        return frozenset(self.token_ids.values())

    def pixel_options(self, pixels: PixelLimits) -> dict[str, dict[str, Any]]:
        """Sizes of images and of videos."""
        return pixel_options(pixels, self.hf.image_processor.size, self.frame_size)

    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]:
        """The fewest pixels of an image, and of a video as its limits count."""
        return pixels.least or self.hf.image_processor.size["shortest_edge"], self.frame_size["shortest_edge"]

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of a frame."""
        area = self.hf.image_processor.patch_size**2
        image, video = (
            max((height * width * area for _, height, width in grids), default=0)
            for grids in (image_grids(self.hf, headers.images, pixels), self.video_grids(headers, pixels))
        )
        return image, video

    def video_grids(self, headers: Headers, pixels: PixelLimits) -> list[tuple[int, int, int]]:
        """(time, height, width) in patches of each video, whose limits are those of a frame."""
        return frame_grids(self.hf, headers.videos, pixel_limits(self.frame_size, None, pixels.video_most))

    def media_tensors(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """The vision tower's tensors."""
        return vision_tensors(features)

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the tower's outputs replace."""
        return vision_tokens(self.hf, media)

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Patches of each image and temporal patch."""
        return vision_rows(media)
