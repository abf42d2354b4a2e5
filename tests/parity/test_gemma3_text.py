"""zoo's Gemma 3 of text alone gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch
from support.pairs import Pair, TextPairTests, worst
from support.rows import text_examples
from support.tiny_gemma3 import FULL, ROPE, SLIDING, tiny_text_config, write_tiny_gemma3_text

from zoo.errors import UserError
from zoo.models.gemma3_text.config import Gemma3TextConfig

LOGITS = 2e-5
GRADIENTS = 2e-5


def load(folder: Path, world: Any) -> Pair:
    limits = {"logits_limit": LOGITS, "gradients_limit": GRADIENTS}
    return Pair.load(folder, world, "model.family=gemma3_text", rows=text_examples, **limits)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    return load(write_tiny_gemma3_text(tmp_path_factory.mktemp("tiny_gemma3_text")), cpu_world)


class TestRows(TextPairTests):
    """What every family must pass."""

    def test_the_logits_are_capped(self, pair: Pair) -> None:
        """So that the tests can see it: some lie near the cap."""
        cap = pair.hf.config.final_logit_softcapping
        assert 0.8 * cap < max(float(logits.abs().max()) for logits in pair.logits) < cap


VARIANTS = [
    pytest.param({"tied": True}, id="tied embeddings"),
    pytest.param({"final_logit_softcapping": None}, id="no cap"),
    pytest.param({"layer_types": [FULL] * 5}, id="no windows"),
    pytest.param({"layer_types": [SLIDING] * 5, "sliding_window": 3}, id="windows in all layers"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures(text: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_gemma3_text(tmp_path, seed=1, **text), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": ROPE | {FULL: {"rope_type": "yarn", "rope_theta": 5.0}}}, "'yarn'"),
    ],
)
def test_what_is_refused(config: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Gemma3TextConfig.from_arch(tiny_text_config().to_dict() | config)
