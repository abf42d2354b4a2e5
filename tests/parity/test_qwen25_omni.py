"""What is special to Qwen2.5-Omni: chunks of its audio tower, and checkpoints of the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch
from support.families import FAMILIES, pair_of
from support.pairs import Pair, worst
from support.tiny import thinker_part
from support.tiny_qwen25_omni import load_thinker, write_tiny_qwen25_omni
from torch import Tensor

from zoo.models.qwen25_omni.config import audio_tokens

pair = pair_of("qwen25_omni")


def test_a_clip_spans_chunks(pair: Pair) -> None:
    chunk = 2 * pair.zoo.assembly.config.thinker.audio_config.n_window
    assert int(pair.examples["audio-long"].sample.media["feature_lens"]) > 2 * chunk, "a clip of three chunks"


@pytest.mark.slow
def test_a_checkpoint_of_the_whole_model(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    whole = FAMILIES["qwen25_omni"].zoo(write_tiny_qwen25_omni(tmp_path, whole=True), cpu_world)
    assert worst(whole.logits(packed_batch(pair.samples)), pair.logits) < pair.logits_limit


@pytest.fixture(scope="module")
def clips(pair: Pair) -> list[Tensor]:
    """(frames, mel) of clips: under a chunk of 70 frames, whole chunks, an odd number of states."""
    generator = torch.Generator().manual_seed(0)
    mel = pair.zoo.model.audio.num_mel_bins
    return [torch.randn(n, mel, generator=generator) for n in (37, 250, 70, 3, 69, 140, 301)]


@torch.no_grad()
def test_a_clip_gives_what_it_gives_alone_in_transformers(pair: Pair, clips: list[Tensor]) -> None:
    frames = [len(clip) for clip in clips]
    tokens = [audio_tokens(n) for n in frames]
    found = pair.zoo.model.audio(torch.cat(clips), frames).split(tokens)
    for clip, embeddings in zip(clips, found, strict=True):
        alone = thinker_part(pair.hf, "audio_tower")(clip.T, feature_lens=torch.tensor([len(clip)])).last_hidden_state
        assert len(alone) == len(embeddings) > 0 and float(alone.std()) > 0.05
        torch.testing.assert_close(embeddings, alone, rtol=0, atol=pair.logits_limit)


def test_tokens_of_a_clip_are_those_of_transformers(pair: Pair) -> None:
    frames = torch.arange(1, 500)
    _, wanted = thinker_part(pair.hf, "audio_tower")._get_feat_extract_output_lengths(frames)
    assert [audio_tokens(n) for n in frames.tolist()] == wanted.tolist()


@pytest.mark.slow
def test_transformers_loads_the_thinker_of_a_whole_model(pair: Pair, tmp_path: Path) -> None:
    """Its class of the whole model wants a file of speakers, which only published folders have."""
    model = load_thinker(write_tiny_qwen25_omni(tmp_path, whole=True))
    wanted = pair.hf.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
