"""What processors of sound share: media tensors and lengths of clips.

Media tensors of a sample (each joined along dim 0 over samples): input_features (frames, mel) float32, padding removed, and
feature_lens (n,) int64, mel frames of each clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.processors.processor import as_tensor
from zoo.errors import ConfigError

CHUNK_TOKENS = 13  # of a full chunk, a number in `_get_feat_extract_output_lengths` of transformers' encoders


def check_window(n_window: int, tokens: int) -> None:
    """ConfigError where `tokens`, those of a chunk of 2 * n_window frames, are not what transformers counts."""
    if tokens != CHUNK_TOKENS:
        raise ConfigError(
            f"audio_config.n_window is {n_window}: transformers counts {CHUNK_TOKENS} tokens for each full audio "
            f"chunk, but chunks of {2 * n_window} frames give {tokens}; use 50."
        )


def sound_tensors(features: Mapping[str, Any], mask: str) -> dict[str, Tensor]:
    """The audio tower's tensors out of a Hugging Face processor's result, in which `mask` names that of the frames."""
    if "input_features" not in features:
        return {}
    mel = as_tensor(features["input_features"], torch.float32)  # (n, mel, longest)
    real = as_tensor(features[mask], torch.bool)  # (n, longest)
    lengths = real.sum(-1)
    if not lengths.all():
        raise RowError("", "corrupt_media", f"sound {int(lengths.argmin())} of the row is under 10 ms long.")
    return {"input_features": mel.transpose(1, 2)[real], "feature_lens": lengths}


def mel_frames(samples: Sequence[int], hop: int, least: int = 0) -> list[int]:
    """Mel frames of a row's sounds with so many samples, those under `least` made as long.

    The longest is cut to whole frames of `hop` samples, as in transformers' feature extractors.
    """
    samples = [max(count, least) for count in samples]
    most = max(samples, default=0) // hop
    return [min(-(-count // hop), most) for count in samples]
