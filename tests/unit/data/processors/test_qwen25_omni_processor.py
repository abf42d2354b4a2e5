"""Qwen2.5-Omni's processor against transformers' own calls, which pad every clip to the longest that there may be."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hf_calls import hf_arguments, omni_videos

from zoo.data.errors import RowError
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row, read_rows
from zoo.errors import ConfigError
from zoo.models.qwen25_omni.config import audio_tokens
from zoo.models.qwen25_omni.processor import Qwen25OmniProcessor, build_processor

VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
ARCH = {"vision_config": VISION, "audio_config": {"num_mel_bins": 80}, "position_id_per_seconds": 25}
SIZE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 32 * 32}


@pytest.fixture(scope="module")
def processor() -> Qwen25OmniProcessor:
    return build_processor({"thinker_config": ARCH})


def encode(processor: Qwen25OmniProcessor, row: Row) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=64)


@pytest.mark.parametrize("chunk", [1, 2])
def test_tokens_and_media_are_those_of_the_hf_call(processor: Qwen25OmniProcessor, media: Path, chunk: int) -> None:
    """`chunk` seconds of a video stand before as many of its sound."""
    processor = build_processor(ARCH | {"seconds_per_chunk": chunk})
    for row in read_rows(media / "rows.jsonl"):
        inputs = hf_arguments(row)
        options = {"fps": 2.0, "do_sample_frames": False, "size": SIZE}
        clock = {"seconds_per_chunk": float(chunk)}
        wanted = processor.hf(**inputs, **omni_videos(processor.hf, row, options, clock))
        sample = encode(processor, row)
        torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
        for name in sample.media.keys() & {"pixel_values", "pixel_values_videos", "video_grid_thw"}:
            torch.testing.assert_close(sample.media[name], wanted[name], rtol=0, atol=0)
        if "audio" in inputs:
            mask = wanted["feature_attention_mask"].bool()
            assert mask.shape[1] == 3000, "30 seconds, of this feature extractor"
            assert sample.media["feature_lens"].tolist() == mask.sum(-1).tolist()
            features = wanted["input_features"].transpose(1, 2)[mask]
            torch.testing.assert_close(sample.media["input_features"], features, rtol=0, atol=1e-6)


def silence(folder: Path, samples: int) -> Row:
    import soundfile

    soundfile.write(folder / "x.wav", np.zeros(samples, dtype=np.float32), 16_000)
    return Row((("user", "<audio>"), ("assistant", "1")), audios=("x.wav",), root=folder)


def test_a_clip_longer_than_the_feature_extractor_s_longest_is_whole(
    processor: Qwen25OmniProcessor, tmp_path: Path
) -> None:
    sample = encode(processor, silence(tmp_path, 31 * 16_000))
    assert sample.media["feature_lens"].tolist() == [3100]
    heard = processor.token_ids["audio_token_id"]
    assert int((sample.input_ids == heard).sum()) == audio_tokens(3100) == 775


def test_a_clip_too_short_for_a_token_is_refused(processor: Qwen25OmniProcessor, tmp_path: Path) -> None:
    with pytest.raises(RowError, match="sound 0 of the row is under 30 ms long"):
        encode(processor, silence(tmp_path, 320))
    assert encode(processor, silence(tmp_path, 321)).media["feature_lens"].tolist() == [3]


@pytest.mark.slow
def test_saved_files_load_by_auto_and_by_us(processor: Qwen25OmniProcessor, tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2_5OmniProcessor

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), Qwen2_5OmniProcessor)
    again = build_processor(ARCH, str(tmp_path))
    assert again.token_ids == processor.token_ids and len(again.media_ids) == 7
    assert again.frame_size == SIZE
    other = ARCH | {"audio_config": {"num_mel_bins": 128}}
    with pytest.raises(ConfigError, match=r"feature_extractor\.feature_size of .* is 80, but .* wants 128"):
        build_processor(other, str(tmp_path))
