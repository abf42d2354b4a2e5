"""zoo's Qwen2.5-Omni gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32. Measured: 4.5e-6 of logits up to 4.8; 2.0e-6 of gradients, relative to the Euclidean
norm of each tensor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.pairs import Pair, PairTests, relative_errors, trained, worst
from support.rows import make_examples
from support.tiny_qwen25_omni import TEXT, load_thinker, published, thinker_config, write_tiny_qwen25_omni
from torch import Tensor

from zoo.errors import UserError
from zoo.models.qwen25_omni.config import Qwen25OmniConfig, audio_tokens

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=qwen25_omni"
ROPE = TEXT["rope_parameters"]


def load(folder: Path, world: Any) -> Pair:
    limits = {"logits_limit": LOGITS, "gradients_limit": GRADIENTS}
    return Pair.load(folder, world, FAMILY, publish=published, rows=make_examples, **limits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen25_omni(tmp_path_factory.mktemp("tiny_qwen25_omni"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a tower must pass."""

    towers = ("vision.", "audio.")

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        media = {name: example.sample.media for name, example in pair.examples.items()}
        chunk = 2 * pair.zoo.assembly.config.thinker.audio_config.n_window
        assert media["text-short"] == {}
        assert int(media["audio-long"]["feature_lens"]) > 2 * chunk, "a clip of three chunks"
        assert {"input_features", "pixel_values_videos"} <= media["audio_in_video-long"].keys()
        spoken = media["spoken+image+spoken+audio"]
        assert len(spoken["video_grid_thw"]) == 2 and len(spoken["feature_lens"]) == 3
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"


@pytest.mark.slow
def test_a_checkpoint_of_the_whole_model(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    whole = Zoo.load(write_tiny_qwen25_omni(tmp_path, whole=True), cpu_world, FAMILY)
    assert worst(whole.logits(packed_batch(pair.samples)), pair.logits) < LOGITS


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
        alone = pair.hf.audio_tower(clip.T, feature_lens=torch.tensor([len(clip)])).last_hidden_state
        assert len(alone) == len(embeddings) > 0 and float(alone.std()) > 0.05
        torch.testing.assert_close(embeddings, alone, rtol=0, atol=LOGITS)


def test_tokens_of_a_clip_are_those_of_transformers(pair: Pair) -> None:
    frames = torch.arange(1, 500)
    _, wanted = pair.hf.audio_tower._get_feat_extract_output_lengths(frames)
    assert [audio_tokens(n) for n in frames.tolist()] == wanted.tolist()


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are several times larger, and their gradient has two sources."""
    pair = load(write_tiny_qwen25_omni(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(trained(pair, gradients)), pair.wanted[1])
    assert max(errors.values()) < GRADIENTS


VARIANTS = [
    pytest.param({"vision": {"fullatt_block_indexes": []}}, id="windows in all layers"),
    pytest.param({"vision": {"window_size": 47}}, id="windows of one embedding"),
    pytest.param({"clock": 13}, id="another clock"),
    pytest.param({"audio": {"n_window": 7}}, id="chunks of 14 frames"),
    pytest.param({"audio": {"n_window": 400}}, id="chunks longer than clips"),
    pytest.param({"audio": {"encoder_attention_heads": 3}}, id="audio heads"),
    pytest.param({"hidden_size": 108, "head_dim": None}, id="heads as wide as the hidden size says"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"rope_parameters": ROPE | {"mrope_section": [0, 8, 1]}}, id="other sections"),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS)
def test_other_architectures(config: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_qwen25_omni(tmp_path, seed=1, **config), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"audio": {"d_model": 31, "encoder_attention_heads": 1}}, "d_model is 31; wanted an even number"),
        ({"audio": {"max_source_positions": 34}}, "max_source_positions is 34; wanted n_window 35"),
        ({"audio": {"attention_dropout": 0.1}}, "attention_dropout is 0.1"),
        ({"vision": {"window_size": 31}}, "window_size is 31; wanted at least the 32 pixels"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
    ],
    ids=["odd width", "positions", "dropout", "windows", "sliding window", "linear rope"],
)
def test_what_is_refused(config: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Qwen25OmniConfig.from_arch(thinker_config(**config).to_dict())


@pytest.mark.slow
def test_transformers_loads_the_thinker_of_a_whole_model(pair: Pair, tmp_path: Path) -> None:
    """Its class of the whole model wants a file of speakers, which only published folders have."""
    model = load_thinker(write_tiny_qwen25_omni(tmp_path, whole=True))
    wanted = pair.hf.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
