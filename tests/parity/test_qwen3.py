"""zoo's Qwen3 gives transformers' logits and gradients, dense and with experts, however the rows are batched.

The two sum in different orders in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch
from support.pairs import Pair, TextPairTests, worst
from support.rows import text_examples
from support.tiny import experts_apart
from support.tiny_qwen3 import ROPE, write_tiny_qwen3

from zoo.errors import UserError

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=qwen3"


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("tiny_qwen3"), moe=request.param)
    limits = {"logits_limit": LOGITS, "gradients_limit": GRADIENTS, "publish": experts_apart}
    return Pair.load(folder, cpu_world, FAMILY, rows=text_examples, **limits)


class TestRows(TextPairTests):
    """What every family must pass."""


VARIANTS = [
    pytest.param({"tied": True}, id="tied embeddings"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"moe": True, "num_experts_per_tok": 3}, id="top 3"),
    pytest.param({"moe": True, "norm_topk_prob": False}, id="weights of experts that do not sum to one"),
    pytest.param({"moe": True, "mlp_only_layers": [], "decoder_sparse_step": 2}, id="every other layer"),
    pytest.param({"num_experts": 4, "num_experts_per_tok": 2}, id="experts of a dense model"),
    pytest.param({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, id="YaRN, refused"),
    pytest.param({"attention_bias": True}, id="attention bias, refused"),
    pytest.param({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, id="windows, refused"),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures_or_an_error(
    text: dict, tmp_path: Path, cpu_world: Any, request: pytest.FixtureRequest
) -> None:
    folder = write_tiny_qwen3(tmp_path, seed=1, **text)
    if "refused" in request.node.callspec.id:
        with pytest.raises(UserError, match=r"rope_type|attention_bias|use_sliding_window"):
            Pair.load(folder, cpu_world, FAMILY, logits_limit=LOGITS, rows=text_examples)
        return
    # Tied embeddings serve as the head, so that logits are about six times larger.
    limit = LOGITS * (10 if text.get("tied") else 2)
    pair = Pair.load(folder, cpu_world, FAMILY, logits_limit=limit, rows=text_examples)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < limit
