"""zoo's Qwen3.5-VL gives transformers' logits and gradients, dense and with experts, however the rows are batched.

The two sum in different orders in fp32. Measured: 1.5e-5 of logits up to 5; 6e-6 of gradients, relative to the Euclidean
norm of each tensor, in the decays of the delta rule (sums that nearly cancel).
"""

from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch
from support.pairs import Pair, PairTests, worst
from support.tiny_qwen35 import FULL, LINEAR, TEXT, write_tiny_qwen35

from zoo.errors import UserError

LOGITS = 3e-5
GRADIENTS = 1.5e-5
FAMILY = ("model.family=qwen35_vl", "train.mtp_loss=0")


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    folder = write_tiny_qwen35(tmp_path_factory.mktemp("tiny_qwen35"), moe=request.param)
    return Pair.load(folder, cpu_world, *FAMILY, logits_limit=LOGITS, gradients_limit=GRADIENTS)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""


ROPE = TEXT["rope_parameters"]
VARIANTS = [
    pytest.param({"tied": True}, id="tied embeddings"),
    pytest.param({"layers": (FULL, FULL, FULL)}, id="full attention alone"),
    pytest.param({"layers": (FULL, LINEAR, LINEAR, LINEAR, FULL)}, id="another order of layers"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"linear_num_value_heads": 4}, id="as many value heads as key heads"),
    pytest.param({"linear_num_key_heads": 1}, id="one linear key head"),
    pytest.param({"linear_conv_kernel_dim": 2}, id="a short convolution"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param(
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 3, 3]}}, id="whole heads rotated"
    ),
    pytest.param({"moe": True, "num_experts_per_tok": 3}, id="top 3"),
    pytest.param({"moe": True, "layers": (FULL, LINEAR)}, id="experts, another order of layers"),
    pytest.param(
        {"moe": True, "norm_topk_prob": False, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2},
        id="keys of other experts, which transformers ignores",
    ),
    pytest.param({"num_experts": 4, "num_experts_per_tok": 2}, id="experts of a dense model"),
    pytest.param({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, id="linear rope"),
    pytest.param({"attention_bias": True}, id="attention bias"),
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures_or_an_error(text: dict, tmp_path: Path, cpu_world: Any) -> None:
    folder = write_tiny_qwen35(tmp_path, seed=1, **text)
    # Tied embeddings serve as the head, so that logits are about six times larger.
    limit = LOGITS * (10 if text.get("tied") else 2)
    try:
        pair = Pair.load(folder, cpu_world, *FAMILY, logits_limit=limit)
    except UserError:
        assert set(text) & {"rope_parameters", "attention_bias"}, "what is refused is named in the README"
        return
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < limit
