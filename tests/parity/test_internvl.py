"""zoo's InternVL gives transformers' logits and gradients with each of its decoders, however the rows are batched.

The two sum in different orders in fp32. Measured: 6e-6 of logits up to 5; 2e-6 of gradients, relative to the Euclidean
norm of each tensor.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.pairs import Pair, PairTests, Tensors, relative_errors, worst
from support.rows import tile_examples
from support.tiny import load_plain
from support.tiny_internvl import LARGE, VARIANTS, publish, tiny_config, write_tiny_internvl
from torch import Tensor

from zoo.errors import UserError
from zoo.models.internvl.config import InternVLConfig
from zoo.steps.media import rank_share

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=internvl"


def trained(gradients: Mapping[str, Tensor | None]) -> Tensors:
    """Gradients that say something: without a norm behind them, keys' biases in the tower cancel in the softmax."""
    nothing = ("vision.", "model.vision_tower.")
    return {
        name: gradient
        for name, gradient in gradients.items()
        if gradient is not None and not (name.startswith(nothing) and name.endswith("k_proj.bias"))
    }


class InternVLZoo(Zoo):
    """Gradients that say something."""

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[float, dict[str, Tensor | None]]:
        loss, found = super().gradients(*args, **kwargs)
        return loss, {**trained(found)}


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    again = partial(InternVLZoo.load, folder, world, FAMILY, "packing.budget=2048", *overrides)
    hf, zoo = load_plain(folder), again()
    examples = tile_examples(zoo.assembly.processor)
    with torch.no_grad():
        logits = [hf(**example.features).logits[0] for example in examples.values()]
    return Pair(hf, zoo, examples, logits, LOGITS, GRADIENTS, lambda found: publish(trained(found)), again)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    return load(write_tiny_internvl(tmp_path_factory.mktemp(request.param), request.param), cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""

    @pytest.mark.sampled(3)
    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        media = {name: example.sample.media for name, example in pair.examples.items()}
        tiles = {name: int(m["num_tiles"]) for name, m in media.items() if "num_tiles" in m}
        assert {name: tiles[name] for name in ("wide", "tall", "square", "two")} == {
            "wide": 4 + 1,
            "tall": 2 + 1,
            "square": 9 + 1,
            "two": 10 + 7,
        }
        assert tiles["video+video+image"] == 4 + 4 + 5
        assert media["text-short"] == {}
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"

    @pytest.mark.slow
    def test_text_alone_leaves_the_tower_a_zero_gradient(self, pair: Pair) -> None:
        samples = [pair.examples[name].sample for name in ("text-short", "text-long")]
        _, gradients = pair.zoo.gradients([packed_batch(samples)], pair.count)
        names = {name for name, _ in pair.zoo.model.named_parameters()}
        assert trained(dict.fromkeys(names, torch.zeros(0))).keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient is not None
            assert bool(gradient.any()) != name.startswith(("vision.", "projector.")), name


@pytest.mark.slow
def test_tiles_change_the_logits_of_their_sample_alone(pair: Pair) -> None:
    """So that the tests above can see an embedding that is lost, or that lands in another sample."""
    samples = [pair.examples[name].sample for name in ("wide", "text-short", "image+video")]
    before = pair.zoo.logits(packed_batch(samples))
    tiles = len(samples[2].media["pixel_values"])
    for tile in range(tiles):
        batch = packed_batch(samples)
        batch.media["pixel_values"][tile - tiles] += 1.0
        wide, text, both = (worst([a], [b]) for a, b in zip(pair.zoo.logits(batch), before, strict=True))
        assert wide == text == 0.0 and both > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 64])
def test_what_ranks_encode_of_shared_media_is_what_one_would(ranks: int, pair: Pair) -> None:
    """Tiles go to ranks one by one, so that none has over one more than another; some may be left without any."""
    media = packed_batch(pair.samples).media
    (tower,) = pair.zoo.step().media_streams(media).values()
    with torch.no_grad():
        whole = pair.zoo.model.encode(media)["vision"].embeddings
        shares = [rank_share(tower, media, rank, ranks) for rank in range(ranks)]
        gathered = torch.zeros(ranks, shares[0].longest, whole.shape[1])
        for mine, share in zip(gathered, shares, strict=True):
            made = pair.zoo.model.encode(share.media)
            if made:
                mine[: len(made["vision"].embeddings)] = made["vision"].embeddings
    torch.testing.assert_close(gathered.flatten(0, 1)[shares[0].place], whole, rtol=1e-5, atol=1e-5)
    tiles = [int(share.media["num_tiles"].sum()) if share.media else 0 for share in shares]
    assert max(tiles) - min(tiles) <= 1 and sum(tiles) == int(media["num_tiles"].sum())


BUILT = [
    pytest.param("qwen3", {"tied": True}, id="tied embeddings"),
    pytest.param("qwen3", {"downsample_ratio": 0.25}, id="one embedding a tile"),
    pytest.param("qwen3", {"downsample_ratio": 1.0, "projector_hidden_act": "relu"}, id="every patch"),
    pytest.param("qwen3", {"vision": {"use_mean_pooling": False}}, id="a norm behind the tower"),
    pytest.param("qwen3", {"vision": {"use_absolute_position_embeddings": False}}, id="no positions"),
    pytest.param("qwen3", {"vision": {"image_size": 38}}, id="a rest of pixels"),
    pytest.param("qwen2", {"vision": LARGE | {"attention_bias": True}}, id="biases before norms"),
    pytest.param("qwen3_moe", {"text": {"norm_topk_prob": False}}, id="experts' weights as they are"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change"), BUILT)
def test_other_architectures(kind: str, change: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_internvl(tmp_path, kind, seed=1, **change), cpu_world)
    more = 10 if change.get("tied") else 2  # logits are then about six times larger
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < more * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < 2 * GRADIENTS


@pytest.mark.slow
def test_a_dynamic_rotary_embedding_is_the_default_one_within_its_length(tmp_path: Path, cpu_world: Any) -> None:
    """As of InternVL3; beyond it transformers stretches the embedding, sample by sample."""
    folder = write_tiny_internvl(tmp_path, "qwen2", text={"max_position_embeddings": 100})
    with pytest.raises(UserError, match=r"set packing\.budget=100 or less"):
        Zoo.load(folder, cpu_world, FAMILY, "packing.budget=101")
    Zoo.load(folder, cpu_world, FAMILY, "packing.budget=100")


GPT_OSS = {  # of InternVL3_5-GPT-OSS-20B-A4B-Preview
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 200064,
}
REFUSED = [
    (
        {"text": GPT_OSS},
        "text_config.model_type is 'gpt_oss', whose attention sinks, experts with biases and .* lacks; .* qwen3_moe only",
    ),
    ({"text": {"model_type": "gemma"}}, "'gemma'; InternVL here has qwen2"),
    ({"vision_feature_layer": -2}, "vision_feature_layer is -2; InternVL here has -1 only"),
    ({"vision_feature_select_strategy": "full"}, "strategy is 'full'; InternVL here has 'default' only"),
    ({"vision": {"use_mask_token": True}}, "use_mask_token is True"),
    ({"vision": {"norm_type": "batch_norm"}}, "norm_type is 'batch_norm'; wanted layer_norm or rms_norm"),
    ({"vision": {"image_size": [32, 64]}}, r"image_size is \[32, 64\]; .* pair of equal ones"),
    ({"vision": {"patch_size": [8]}}, r"patch_size is \[8\]"),
    ({"vision": {"patch_size": 40}}, "a tile 0 patches a side"),
    ({"vision": {"image_size": 40}}, "downsample_ratio is 0.5 and a tile 5 patches a side"),
    ({"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
    ({"vision": {"hidden_dropout_prob": 0.1}}, "vision_config.hidden_dropout_prob is 0.1"),
    ({"vision": {"projection_dropout": 0.1}}, "vision_config.projection_dropout is 0.1"),
    ({"text": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, "'linear'"),
]


@pytest.mark.parametrize(("change", "complaint"), REFUSED)
def test_configs_that_are_not_built_are_refused(change: dict, complaint: str) -> None:
    arch = tiny_config().to_dict()
    for key, value in change.items():
        key = f"{key}_config" if isinstance(value, dict) else key
        arch[key] = arch[key] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=complaint):
        InternVLConfig.from_arch(arch)
