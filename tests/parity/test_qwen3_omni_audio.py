"""The audio tower: a clip gives the same embeddings whatever stands beside it, which transformers' own does not."""

from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.tiny import thinker_part
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from zoo.nn.towers.audio import audio_tokens, tokens_of_chunk

# Mel frames (10 ms each) of clips: under a chunk of 100 frames, a whole chunk, over an attention window of 200.
FRAMES = [37, 250, 100, 8, 99, 1, 512, 101]
LIMIT = 1e-5  # embeddings are of order 1


@pytest.fixture(scope="module")
def clips(zoo: Zoo) -> list[Tensor]:
    """(frames, mel) features."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, zoo.model.audio.num_mel_bins, generator=generator) for n in FRAMES]


@torch.no_grad()
def through_zoo(zoo: Zoo, clips: list[Tensor]) -> list[Tensor]:
    frames = [len(clip) for clip in clips]
    embeddings = zoo.model.audio(torch.cat(clips), frames)
    return list(embeddings.split([audio_tokens(n, zoo.model.audio.n_window) for n in frames]))


@torch.no_grad()
def through_transformers(hf: Any, clips: list[Tensor]) -> list[Tensor]:
    frames = torch.tensor([len(clip) for clip in clips])
    embeddings = thinker_part(hf, "audio_tower")(torch.cat(clips).T, feature_lens=frames).last_hidden_state
    return list(embeddings.split(_get_feat_extract_output_lengths(frames).tolist()))


def test_each_clip_alone_equals_transformers(zoo: Zoo, hf: Any, clips: list[Tensor]) -> None:
    for clip in clips:
        (found,), (wanted,) = through_zoo(zoo, [clip]), through_transformers(hf, [clip])
        assert float(wanted.std()) > 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=LIMIT)


def test_a_clip_does_not_feel_its_neighbours(zoo: Zoo, clips: list[Tensor]) -> None:
    alone = [through_zoo(zoo, [clip])[0] for clip in clips]
    for order in (range(len(clips)), reversed(range(len(clips))), [3, 0, 4, 5], [3, 6]):
        picked = list(order)
        for found, clip in zip(through_zoo(zoo, [clips[i] for i in picked]), picked, strict=True):
            torch.testing.assert_close(found, alone[clip], rtol=0, atol=LIMIT)


def test_transformers_lets_a_longer_clip_change_a_short_one(hf: Any, clips: list[Tensor]) -> None:
    """Why zoo has a tower of its own. Where this fails, transformers has fixed it: take its encoder as it is."""
    short = FRAMES.index(37)
    (alone,) = through_transformers(hf, [clips[short]])
    beside = through_transformers(hf, clips)[short]
    assert float((alone[:-1] - beside[:-1]).abs().max()) > 1e-3, "attention carries it from the last token to all"
    # Clips of a chunk or more are padded to the same width alone and together.
    longer = [clip for clip in clips if len(clip) >= 100]
    for clip, found in zip(longer, through_transformers(hf, longer), strict=True):
        torch.testing.assert_close(found, through_transformers(hf, [clip])[0], rtol=0, atol=LIMIT)


def test_gradients_do_not_feel_the_neighbours(zoo: Zoo, clips: list[Tensor]) -> None:
    tower = zoo.model.audio
    weights = list(tower.parameters())

    def gradients(groups: list[list[Tensor]]) -> list[Tensor]:
        loss = sum(tower(torch.cat(group), [len(clip) for clip in group]).square().sum() for group in groups)
        return list(torch.autograd.grad(loss, weights))

    apart, together = gradients([[clip] for clip in clips]), gradients([clips])
    names = [name for name, _ in tower.named_parameters()]
    for name, found, wanted in zip(names, together, apart, strict=True):
        if not name.endswith("k_proj.bias"):  # zero but for rounding
            assert float((found - wanted).norm() / wanted.norm()) < LIMIT, name


def test_lengths_are_those_of_transformers() -> None:
    frames = torch.arange(1, 3001)
    assert [audio_tokens(n, 50) for n in frames.tolist()] == _get_feat_extract_output_lengths(frames).tolist()


@pytest.mark.parametrize("n_window", [50, 100, 8])
def test_lengths_are_what_the_convolutions_give(n_window: int, zoo: Zoo) -> None:
    """For any window: transformers' formula has the 13 tokens of n_window = 50 written in."""
    tower = zoo.model.audio
    chunk = torch.zeros(1, 1, tower.num_mel_bins, 2 * n_window)
    with torch.no_grad():
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            chunk = conv(chunk)
    assert tokens_of_chunk(2 * n_window) == chunk.shape[-1]
    assert audio_tokens(6 * n_window + 3, n_window) == 3 * chunk.shape[-1] + 1
