"""Qwen3-ASR's processor: one clip a row, against transformers' own calls, and the published chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import templates

from zoo.data.media.decode import load_audio
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.row_set import foreign_media
from zoo.data.sources.rows import Row, RowError, read_rows
from zoo.errors import ConfigError
from zoo.models.qwen3_asr.processor import Qwen3ASRProcessor, build_processor

ARCH = {"audio_config": {"n_window": 50, "num_mel_bins": 80}}


@pytest.fixture
def processor() -> Qwen3ASRProcessor:
    return build_processor(ARCH)


def encode(processor: Qwen3ASRProcessor, row: Row) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=64)


def heard(tmp_path: Path, make: Any, seconds: float, *turns: tuple[str, str]) -> Row:
    make.audio(tmp_path / "clip.wav", make.tone(seconds))
    return Row(turns, audios=("clip.wav",), root=tmp_path, source="x:1")


def test_tokens_and_media_are_those_of_the_hf_call(processor: Qwen3ASRProcessor) -> None:
    rows = [row for row in read_rows("digits:heldout") if row.kind in ("audio", "text")][:8]
    assert {row.kind for row in rows} == {"audio", "text"}
    for row in rows:
        turns = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in row.messages)
        turns = turns.replace("<audio>", "<|audio_start|><|audio_pad|><|audio_end|>")
        sounds = [load_audio(row.path(name)) for name in row.audios] or None
        wanted = processor.hf(text=turns, audio=sounds)
        sample = encode(processor, row)
        torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
        if sounds:
            real = wanted["input_features_mask"][0].bool()
            torch.testing.assert_close(
                sample.media["input_features"], wanted["input_features"][0].T[real], rtol=0, atol=0
            )
            assert sample.media["feature_lens"].tolist() == [int(real.sum())]
            assert not wanted["input_features"][0].T[~real].any(), "the tower pads with zeros as well"


@pytest.mark.parametrize("seconds", [0.02, 0.499, 0.5, 0.503, 1.0, 1.507, 3.2])
def test_lengths_are_known_before_decoding(
    seconds: float, processor: Qwen3ASRProcessor, make: Any, tmp_path: Path
) -> None:
    row = heard(tmp_path, make, seconds, ("user", "<audio>Write."), ("assistant", "1"))
    found = processor.measure(row, video_fps=2.0, max_frames=64)
    assert found == processor.size(encode(processor, row))
    assert found is not None and list(found.media["audio"]) == [max(50, int(seconds * 16000) // 160)]


def test_the_published_template_writes_context_sound_and_answer(
    processor: Qwen3ASRProcessor, make: Any, tmp_path: Path
) -> None:
    processor.hf.chat_template = templates.QWEN3_ASR
    answer = "language English<asr_text>Hello."
    turns = (("system", "Names: Ann."), ("user", "<audio>"), ("assistant", answer))
    sample = encode(processor, heard(tmp_path, make, 0.5, *turns))
    text = processor.tokenizer.decode(sample.input_ids).replace("<|audio_pad|>", "")
    assert text == (
        "<|im_start|>system\nNames: Ann.<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_end|><|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
    labels = sample.labels[sample.labels != IGNORE]
    assert processor.tokenizer.decode(labels) == f"{answer}<|im_end|>"


def test_words_that_the_template_leaves_out_are_refused(
    processor: Qwen3ASRProcessor, make: Any, tmp_path: Path
) -> None:
    processor.hf.chat_template = templates.QWEN3_ASR
    row = heard(tmp_path, make, 0.5, ("user", "<audio>Which digits?"), ("assistant", "1"))
    with pytest.raises(RowError, match=r"x:1: the chat template leaves out what the user says: 'Which digits\?'"):
        encode(processor, row)


def test_two_clips_in_a_row_are_refused_as_by_transformers(
    processor: Qwen3ASRProcessor, make: Any, tmp_path: Path
) -> None:
    row = heard(tmp_path, make, 0.5, ("user", "<audio><audio>"), ("assistant", "1"))
    row = Row(row.messages, audios=("clip.wav",) * 2, root=tmp_path, source="x:1")
    with pytest.raises(RowError, match="Got 1 text but 2 audios"):
        encode(processor, row)
    assert foreign_media(row, processor.modalities) == {"audio"}
    rows = read_rows("digits:heldout")
    taken = {row.kind for row in rows if not foreign_media(row, processor.modalities)}
    assert taken == {"audio", "text"} and "multi_audio" in {row.kind for row in rows}


def test_saved_files_load_by_auto_and_by_us(processor: Qwen3ASRProcessor, tmp_path: Path) -> None:
    from transformers import AutoProcessor
    from transformers import Qwen3ASRProcessor as Hf

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_asr"}))
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), Hf)
    again = build_processor(ARCH, str(tmp_path))
    assert again.token_ids == processor.token_ids and len(again.media_ids) == 3
    with pytest.raises(ConfigError, match=r"feature_extractor\.feature_size of .* is 80, but .* wants 128"):
        build_processor({"audio_config": {"n_window": 50, "num_mel_bins": 128}}, str(tmp_path))
    with pytest.raises(ConfigError, match="n_window is 40: transformers counts 13 tokens"):
        build_processor({"audio_config": {"n_window": 40, "num_mel_bins": 80}})
