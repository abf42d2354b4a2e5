"""Qwen3-Omni's processor: images, videos, speech and videos with their sound, as the thinker's towers take them.

Media tensors of a sample (each joined along dim 0 over samples):
    pixel_values (P, C * tp * p * p) float32 and image_grid_thw (n, 3) int64, in patches;
    pixel_values_videos, video_grid_thw likewise, and video_second_per_grid (n,) float32, seconds of a temporal patch;
    input_features (frames, mel) float32, padding removed, and feature_lens (n,) int64, mel frames of each clip.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.processor import ChatMarkers, Processor, as_tensor
from zoo.data.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.errors import ConfigError
from zoo.models.qwen3_omni.audio import audio_tokens, tokens_of_chunk

MARKERS = ChatMarkers(header="<|im_start|>assistant\n", end="<|im_end|>")
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
CHUNK_TOKENS = 13  # tokens of a full audio chunk, fixed in _get_feat_extract_output_lengths of modeling_qwen3_omni_moe.py
TINY_IMAGE_TOKENS = (1, 512)  # least and most tokens of an image, for the processor without published files
TINY_FRAME_TOKENS = (1, 256)  # the same of a video's frame


def token_ids(tokenizer: Any) -> dict[str, int]:
    """The token ids that the thinker's config needs, and `vocab_size` (for a model made for this tokenizer)."""
    ids = {key: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for key, name in TOKENS.items()}
    return {**ids, "vocab_size": len(tokenizer)}


def build_processor(arch_config: Any, source: str | None = None) -> Qwen3OmniProcessor:
    """The processor of a run.

    Args:
        arch_config: the architecture as Hugging Face writes it (a dict or a config object), whole or its thinker_config.
        source: a Hugging Face folder with the processor's files; None makes one from the bundled tokenizer, whose
            smallest picture, 32 x 32 pixels, is one token.

    Raises:
        ConfigError: no processor in `source`, one of another family, or one that doesn't fit the architecture.
    """
    thinker = _field(arch_config, "thinker_config", arch_config)
    vision, audio = _field(thinker, "vision_config"), _field(thinker, "audio_config")
    geometry = {
        "patch_size": _field(vision, "patch_size"),
        "merge_size": _field(vision, "spatial_merge_size"),
        "temporal_patch_size": _field(vision, "temporal_patch_size"),
    }
    n_window = _field(audio, "n_window")
    if tokens_of_chunk(2 * n_window) != CHUNK_TOKENS:
        raise ConfigError(
            f"audio_config.n_window is {n_window}: transformers counts {CHUNK_TOKENS} tokens for each full audio "
            f"chunk, but chunks of {2 * n_window} frames give {tokens_of_chunk(2 * n_window)}; use 50."
        )
    mel_bins = _field(audio, "num_mel_bins")
    hf = _make(geometry, mel_bins) if source is None else _load(source, geometry, mel_bins)
    return Qwen3OmniProcessor(hf, n_window, _field(thinker, "position_id_per_seconds"))


class Qwen3OmniProcessor(Processor):
    """`Processor` around transformers' Qwen3OmniMoeProcessor.

    Args:
        hf: the Qwen3OmniMoeProcessor.
        n_window: half of an audio chunk, in mel frames.
        position_id_per_seconds: temporal positions a second, which order sound among frames.
    """

    def __init__(self, hf: Any, n_window: int, position_id_per_seconds: float) -> None:
        super().__init__(hf, MARKERS)
        self.n_window = n_window
        self.position_id_per_seconds = position_id_per_seconds
        self.video_size = _video_size(hf)

    def call_options(self, row: Row, fps: float | None) -> dict[str, Any]:
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

    def media_tensors(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """The towers' tensors; see the module's docstring."""
        media: dict[str, Tensor] = {}
        for name in ("pixel_values", "pixel_values_videos", "video_second_per_grid"):
            if name in features:
                media[name] = as_tensor(features[name], torch.float32)
        for name in ("image_grid_thw", "video_grid_thw"):
            if name in features:
                media[name] = as_tensor(features[name], torch.int64)
        if "input_features" in features:
            mel = as_tensor(features["input_features"], torch.float32)  # (n, mel, longest)
            mask = as_tensor(features["feature_attention_mask"], torch.bool)  # (n, longest)
            lengths = mask.sum(-1)
            if not lengths.all():
                raise RowError(
                    "", "corrupt_media", f"sound {int(lengths.argmin())} of the row is under 10 ms long."
                )
            media["input_features"] = mel.transpose(1, 2)[mask]
            media["feature_lens"] = lengths
        return media

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the towers' outputs replace."""
        merge = self.hf.image_processor.merge_size**2
        counts = {}
        for token, name in ((self.hf.image_token, "image_grid_thw"), (self.hf.video_token, "video_grid_thw")):
            counts[token] = int(media[name].prod(-1).sum()) // merge if name in media else 0
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        counts[self.hf.audio_token] = sum(audio_tokens(count, self.n_window) for count in frames)
        return counts

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholder tokens and of the start and end tokens around them."""
        return frozenset(id for key, id in token_ids(self.tokenizer).items() if key != "vocab_size")


def _field(config: Any, name: str, default: Any = None) -> Any:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    value = default if value is None else value
    if value is None:
        raise ConfigError(
            f"model.arch has no {name!r}; give it as the Hugging Face config of Qwen3-Omni does."
        )
    return value


def _make(geometry: dict[str, int], mel_bins: int) -> Any:
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    unit = (geometry["patch_size"] * geometry["merge_size"]) ** 2  # pixels of a token
    pixels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **geometry}
    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size=_edges(TINY_IMAGE_TOKENS, unit), **pixels),
        # cap_pixels_per_frame False is what the published processors do today (without a warning that it may change).
        video_processor=Qwen2VLVideoProcessor(
            size=_edges(TINY_FRAME_TOKENS, unit), do_sample_frames=False, cap_pixels_per_frame=False, **pixels
        ),
        feature_extractor=WhisperFeatureExtractor(feature_size=mel_bins, return_attention_mask=True),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def _edges(tokens: tuple[int, int], unit: int) -> dict[str, int]:
    return {"shortest_edge": tokens[0] * unit, "longest_edge": tokens[1] * unit}


def _load(source: str, geometry: dict[str, int], mel_bins: int) -> Any:
    from transformers import AutoProcessor

    try:
        hf = AutoProcessor.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.init: no processor can be loaded from {Path(source)}: {error}; its folder should hold "
            "preprocessor_config.json (or processor_config.json), the tokenizer's files and the chat template."
        ) from error
    if type(hf).__name__ != "Qwen3OmniMoeProcessor":
        raise ConfigError(
            f"model.init: {source} has a {type(hf).__name__}; a Qwen3OmniMoeProcessor is wanted."
        )
    found = {
        f"{part}.{name}": (getattr(getattr(hf, part), name), wanted)
        for part in ("image_processor", "video_processor")
        for name, wanted in geometry.items()
    }
    found["feature_extractor.feature_size"] = (hf.feature_extractor.feature_size, mel_bins)
    for name, (seen, wanted) in found.items():
        if seen != wanted:
            raise ConfigError(
                f"model.init: {name} of {source} is {seen}, but the architecture wants {wanted}."
            )
    return hf


def _video_size(hf: Any) -> dict[str, int] | None:
    """Pixel limits of a frame, where the folder has limits meant for videos; None leaves the class's own.

    Qwen3OmniMoeProcessor's call puts its class's default (128 to 768 tokens a frame) over what its video processor was
    saved with. The published checkpoints have no file for videos, so their video processor merely repeats the image
    processor's limits, and the class's default is right for them.
    """
    size, images = dict(hf.video_processor.size), dict(hf.image_processor.size)
    return None if size == images else {name: size[name] for name in ("shortest_edge", "longest_edge")}
