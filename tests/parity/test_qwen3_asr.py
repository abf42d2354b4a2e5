"""zoo's Qwen3-ASR gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32. Measured: 4.5e-6 of logits up to 4.5; 3.8e-6 of gradients, relative to the Euclidean norm
of each tensor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.pairs import Pair, PairTests, relative_errors, worst
from support.rows import sound_examples
from support.tiny import load_plain
from support.tiny_qwen3_asr import ROPE, tiny_config, write_tiny_qwen3_asr
from support.weights import differences, export, tensors
from torch import Tensor

from zoo.errors import UserError
from zoo.models.qwen3_asr.config import Qwen3ASRConfig
from zoo.nn.towers.audio import audio_tokens

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=qwen3_asr"
# Mel frames (10 ms each) of clips: under a chunk of 100 frames, a whole chunk, over an attention window of 200.
FRAMES = [50, 250, 100, 8, 99, 1, 512, 101]


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    return Pair.load(
        folder, world, FAMILY, *overrides, logits_limit=LOGITS, gradients_limit=GRADIENTS, rows=sound_examples
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_asr(tmp_path_factory.mktemp("tiny_qwen3_asr"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a tower must pass."""

    towers = ("audio.", "projector.")

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        frames = {
            name: example.sample.media.get("feature_lens", torch.zeros(1)).tolist()
            for name, example in pair.examples.items()
        }
        assert frames["text-short"] == [0]
        assert frames["audio-short"] < [100] and frames["audio-long"] > [200]
        assert all(len(clips) == 1 for clips in frames.values())
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"


def test_clips_of_any_length_side_by_side_give_what_each_gives_alone(pair: Pair) -> None:
    """Embeddings and gradients, against transformers' encoder and projector run on each clip by itself."""
    generator = torch.Generator().manual_seed(0)
    clips = [torch.randn(n, 80, generator=generator) for n in FRAMES]
    tower, projector, hf = pair.zoo.model.audio, pair.zoo.model.projector, pair.hf.model

    def alone(clip: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(clip, (0, 0, 0, -len(clip) % 100))
        mask = (torch.arange(len(whole)) < len(clip)).long()
        return hf.get_audio_features(whole.T[None], mask[None]).pooler_output

    hf.zero_grad(set_to_none=True)
    wanted = torch.cat([alone(clip) for clip in clips])
    for order in (range(len(clips)), [3, 0, 4, 5]):
        picked = list(order)
        found = projector(tower(torch.cat([clips[i] for i in picked]), [FRAMES[i] for i in picked]))
        apart = wanted.split([audio_tokens(n, 50) for n in FRAMES])
        torch.testing.assert_close(found, torch.cat([apart[i] for i in picked]), rtol=0, atol=1e-5)
    found = projector(tower(torch.cat(clips), FRAMES))
    for model, out in ((hf, wanted), (pair.zoo.model, found)):
        model.zero_grad(set_to_none=True)
        out.square().sum().backward()
    names = {"audio": "audio_tower", "projector": "multi_modal_projector"}
    for ours, theirs in names.items():
        own = getattr(pair.zoo.model, ours).named_parameters()
        hers = dict(getattr(hf, theirs).named_parameters())
        for name, parameter in own:
            if not name.endswith("k_proj.bias"):  # zero but for rounding
                want = hers[name].grad
                assert float((parameter.grad - want).norm() / want.norm()) < 1e-5, name
    for model in (pair.hf, pair.zoo.model):
        model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are several times larger, and their gradient has two sources."""
    pair = load(write_tiny_qwen3_asr(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.language_model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < GRADIENTS


VARIANTS = [
    pytest.param({"audio": {"n_window_infer": 100}}, id="windows of one chunk"),
    pytest.param({"audio": {"n_window_infer": 250}}, id="windows that cut a chunk count as whole ones"),
    pytest.param({"audio": {"n_window_infer": 800}}, id="windows longer than clips"),
    pytest.param({"audio": {"num_mel_bins": 128}}, id="more mel bins"),
    pytest.param({"audio": {"activation_function": "relu"}}, id="activation of layers and projector"),
    pytest.param({"audio": {"scale_embedding": True}}, id="a key that transformers' encoder reads in vain"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS)
def test_other_architectures(config: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_qwen3_asr(tmp_path, seed=1, **config), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["Qwen3ASRForTokenClassification"]}, "that of Qwen3-ForcedAligner"),
        ({"thinker_config": {"audio_config": {}}}, "has a thinker_config: .* Qwen/Qwen3-ASR-0.6B-hf"),
        ({"text_config": {"model_type": "qwen2"}}, "text_config.model_type is 'qwen2'"),
        ({"audio_config": {"model_type": "whisper"}}, "audio_config.model_type is 'whisper'"),
        ({"audio_config": {"n_window_infer": 50}}, "n_window_infer is 50; wanted a chunk or more"),
        ({"audio_config": {"max_position_embeddings": 12}}, "wanted the 13 embeddings of a chunk"),
        ({"audio_config": {"output_dim": 46}}, "output_dim is 46; wanted text_config.hidden_size 44"),
        ({"text_config": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}}, "is 'linear'"),
    ],
    ids=["aligner", "first layout", "decoder", "tower", "windows", "positions", "width", "rope"],
)
def test_what_is_refused(change: dict, complaint: str) -> None:
    arch = tiny_config().to_dict()
    for key, value in change.items():
        arch[key] = arch[key] | value if key in arch and isinstance(value, dict) else value
    with pytest.raises(UserError, match=complaint):
        Qwen3ASRConfig.from_arch(arch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out_as_published(tied: bool, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Qwen3ASRForConditionalGeneration

    source = write_tiny_qwen3_asr(tmp_path / "in", tied=tied)
    wanted = tensors(source)
    assert ("lm_head.weight" in wanted) != tied
    before = load_plain(source).state_dict()
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    after, report = Qwen3ASRForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report
