"""Qwen3-Omni's processor: images, videos, speech and videos with their sound, as the thinker's towers take them.

Media tensors of a sample (each joined along dim 0 over samples), beside those of `zoo.data.processors.vision`:
    video_second_per_grid (n,) float32, seconds of a temporal patch;
    input_features (frames, mel) float32, padding removed, and feature_lens (n,) int64, mel frames of each clip.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.sizes import Headers
from zoo.data.processors import sound, vision
from zoo.data.processors.processor import Processor, Sketch, as_tensor
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.nn.towers.audio import audio_tokens, tokens_of_chunk

# Config key -> attribute of the tokenizer that holds the token (tokenizer_config.json of the published checkpoints).
TOKENS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "audio_token_id": "audio_token",
    "vision_start_token_id": "vision_bos_token",
    "vision_end_token_id": "vision_eos_token",
    "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
}
TINY_FRAME_TOKENS = (
    1,
    256,
)  # least and most tokens of a video's frame, for the processor without published files


def token_ids(tokenizer: Any) -> dict[str, int]:
    """The token ids that the thinker's config needs."""
    return {key: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for key, name in TOKENS.items()}


def build_processor(arch_config: Any, source: str | None = None) -> Qwen3OmniProcessor:
    """The processor of a run.

    Args:
        arch_config: the architecture as Hugging Face writes it (a dict or a config object), whole or its thinker_config.
        source: a Hugging Face folder with the processor's files; None makes one from the bundled tokenizer, whose
            smallest picture, 32 x 32 pixels, is one token.

    Raises:
        ConfigError: no processor in `source`, one of another family, or one that doesn't fit the architecture.
    """
    thinker = vision.config_field(arch_config, "thinker_config", arch_config)
    audio = vision.config_field(thinker, "audio_config")
    geometry = vision.vision_geometry(vision.config_field(thinker, "vision_config"))
    n_window = vision.config_field(audio, "n_window")
    sound.check_window(n_window, tokens_of_chunk(2 * n_window))
    mel_bins = vision.config_field(audio, "num_mel_bins")
    if source is None:
        hf = _make(geometry, mel_bins)
    else:
        wanted = vision.wanted_geometry(geometry) | {"feature_extractor.feature_size": mel_bins}
        hf = vision.load_processor(source, "Qwen3OmniMoeProcessor", wanted)
    return Qwen3OmniProcessor(hf, n_window, vision.config_field(thinker, "position_id_per_seconds"))


class Qwen3OmniProcessor(Processor):
    """`Processor` around transformers' Qwen3OmniMoeProcessor.

    Args:
        hf: the Qwen3OmniMoeProcessor.
        n_window: half of an audio chunk, in mel frames.
        position_id_per_seconds: temporal positions a second, which order sound among frames.
    """

    def __init__(self, hf: Any, n_window: int, position_id_per_seconds: float) -> None:
        super().__init__(hf, vision.MARKERS)
        self.n_window = n_window
        self.position_id_per_seconds = position_id_per_seconds
        self.video_size = _video_size(hf)
        self.pixels_of_token = (hf.image_processor.patch_size * hf.image_processor.merge_size) ** 2

    def call_options(self, row: Row, media: Mapping[str, list], fps: float | None) -> dict[str, Any]:
        """Arguments of the HF call that must agree with the architecture and with how the frames were taken."""
        options: dict[str, Any] = {}
        if row.videos:
            options["videos_kwargs"] = {
                "fps": fps,
                "do_sample_frames": False,
                "use_audio_in_video": row.use_audio_in_video,
                "position_id_per_seconds": self.position_id_per_seconds,
            }
            if self.video_size is not None:
                options["videos_kwargs"]["size"] = dict(self.video_size)
        if row.audios or row.use_audio_in_video:
            options["audio_kwargs"] = {"n_window": self.n_window}
        return options

    def pixel_options(self, pixels: PixelLimits) -> dict[str, dict[str, Any]]:
        """Sizes of images, and of a video's frames."""
        return vision.pixel_options(pixels, self.hf.image_processor.size, self._frame_size)

    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]:
        """The fewest pixels of an image, and of a frame."""
        return pixels.least or self.hf.image_processor.size["shortest_edge"], self._frame_size[
            "shortest_edge"
        ]

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """The most pixels of an image, and of a frame."""
        images = vision.image_grids(self.hf, headers.images, pixels)
        area = self.hf.image_processor.patch_size**2
        image, video = (
            max((height * width * area for _, height, width in grids), default=0)
            for grids in (images, self._video_grids(headers, pixels))
        )
        return image, video

    @property
    def _frame_size(self) -> dict[str, int]:
        """Limits of a frame: the folder's, or those of transformers' class."""
        return self.video_size or {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}

    def media_tensors(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """The towers' tensors by name; the module's docstring lists them."""
        media = vision.vision_tensors(features)
        if "video_second_per_grid" in features:
            media["video_second_per_grid"] = as_tensor(features["video_second_per_grid"], torch.float32)
        return media | sound.sound_tensors(features, "feature_attention_mask")

    def model_inputs(self, row: Row, features: dict[str, Any]) -> dict[str, Any]:
        """The features, with what the thinker takes beside them."""
        if "video_second_per_grid" in features:
            features["video_second_per_grid"] = torch.as_tensor(features["video_second_per_grid"])
        return {**features, "use_audio_in_video": row.use_audio_in_video}

    def incomparable(self, sample: Sample) -> str | None:
        """Clips under a chunk beside longer ones: transformers pads them to the longest, which its encoder sees."""
        lengths = sample.media.get("feature_lens")
        if lengths is None or len(lengths.clamp(max=2 * self.n_window).unique()) == 1:
            return None
        return "sound under a second, for which transformers' encoder depends on what else is in the row"

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the towers' outputs replace."""
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        heard = sum(audio_tokens(count, self.n_window) for count in frames)
        return vision.vision_tokens(self.hf, media) | {self.hf.audio_token: heard}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Patches of each image and temporal patch, and mel frames of each clip."""
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        return vision.vision_rows(media) | {"audio": frames}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text: a token for each medium, and two more around the sound of a video that is heard."""
        if headers.videos and self.hf.video_processor.cap_pixels_per_frame:
            return None
        grids = [
            *vision.image_grids(self.hf, headers.images, pixels),
            *self._video_grids(headers, pixels),
        ]
        frames = sound.mel_frames(headers.sounds, self.hf.feature_extractor.hop_length)
        heard = [audio_tokens(count, self.n_window) for count in frames]
        merged = self.hf.image_processor.merge_size**2
        tokens = sum(time * height * width // merged for time, height, width in grids) + sum(heard)
        tracks = len(row.videos) if row.use_audio_in_video else 0
        further = tokens - len(grids) - (len(heard) - tracks) + 2 * tracks
        return Sketch(text, further, {"vision": vision.grid_rows(grids), "audio": frames})

    def _video_grids(self, headers: Headers, pixels: PixelLimits) -> list[tuple[int, int, int]]:
        """(time, height, width) in patches of each video."""
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

        videos = self.hf.video_processor
        size = vision.pixel_limits(self._frame_size, None, pixels.video_most)
        patch, limits = videos.patch_size, (size["shortest_edge"], size["longest_edge"])
        grids = []
        for count, height, width in headers.videos:
            high, wide = smart_resize(height, width, patch * videos.merge_size, *limits)
            grids.append((-(-count // videos.temporal_patch_size), high // patch, wide // patch))
        return grids

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the tokens around and in the place of media."""
        return token_ids(self.tokenizer)

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholders and the tokens around them."""
        return frozenset(self.token_ids.values())


def _make(geometry: dict[str, int], mel_bins: int) -> Any:
    from transformers import Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

    # cap_pixels_per_frame False is what the published processors do today (without a warning that it may change).
    video = Qwen2VLVideoProcessor(
        do_sample_frames=False,
        cap_pixels_per_frame=False,
        **vision.tiny_settings(geometry, TINY_FRAME_TOKENS),
    )
    return Qwen3OmniMoeProcessor(
        video_processor=video,
        feature_extractor=WhisperFeatureExtractor(feature_size=mel_bins, return_attention_mask=True),
        **vision.tiny_parts(geometry),
    )


def _video_size(hf: Any) -> dict[str, int] | None:
    """Pixel limits of a frame, where the folder has limits meant for videos; None leaves the class's own.

    Qwen3OmniMoeProcessor's call puts its class's default (128 to 768 tokens a frame) over what its video processor was
    saved with. The published checkpoints have no file for videos, so their video processor merely repeats the image
    processor's limits, and the class's default is right for them.
    """
    size, images = dict(hf.video_processor.size), dict(hf.image_processor.size)
    return None if size == images else {name: size[name] for name in ("shortest_edge", "longest_edge")}
