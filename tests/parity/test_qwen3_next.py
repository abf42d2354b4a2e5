"""zoo's Qwen3-Next gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32, as for Qwen3.5-VL, whose layers these are.
"""

from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch
from support.pairs import Pair, TextPairTests, worst
from support.rows import text_examples
from support.tiny import experts_apart
from support.tiny_qwen3_next import ROPE, write_tiny_qwen3_next
from support.tiny_qwen35 import FULL, LINEAR

from zoo.errors import UserError

LOGITS = 3e-5
GRADIENTS = 1.5e-5
FAMILY = ("model.family=qwen3_next", "train.mtp_loss=0")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    folder = write_tiny_qwen3_next(tmp_path_factory.mktemp("tiny_qwen3_next"))
    limits = {"logits_limit": LOGITS, "gradients_limit": GRADIENTS, "publish": experts_apart}
    return Pair.load(folder, cpu_world, *FAMILY, rows=text_examples, **limits)


class TestRows(TextPairTests):
    """What every family must pass."""


VARIANTS = [
    pytest.param({"tied": True}, id="tied embeddings"),
    pytest.param({"layers": (FULL, FULL, FULL)}, id="full attention alone"),
    pytest.param({"layers": (FULL, LINEAR, LINEAR, FULL)}, id="another order of layers"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"linear_num_value_heads": 4}, id="as many value heads as key heads"),
    pytest.param({"linear_num_key_heads": 1}, id="one linear key head"),
    pytest.param({"linear_num_key_heads": 2}, id="four value heads to a key head"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, id="whole heads rotated"),
    pytest.param({"mlp_only_layers": [], "num_experts_per_tok": 3}, id="experts alone, top 3"),
    pytest.param({"norm_topk_prob": False}, id="weights of experts that do not sum to one"),
    pytest.param({"decoder_sparse_step": 2}, id="every other layer"),
    pytest.param({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, id="linear, refused"),
    pytest.param({"attention_bias": True}, id="attention bias, refused"),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures_or_an_error(
    text: dict, tmp_path: Path, cpu_world: Any, request: pytest.FixtureRequest
) -> None:
    folder = write_tiny_qwen3_next(tmp_path, seed=1, **text)
    if "refused" in request.node.callspec.id:
        with pytest.raises(UserError, match=r"rope_type|attention_bias"):
            Pair.load(folder, cpu_world, *FAMILY, logits_limit=LOGITS, rows=text_examples)
        return
    limit = LOGITS * (10 if text.get("tied") else 2)
    pair = Pair.load(folder, cpu_world, *FAMILY, logits_limit=limit, rows=text_examples)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < limit
