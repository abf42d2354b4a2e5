"""Other architectures of the family: zoo gives transformers' logits, or says that it does not have the feature."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.rows import Example
from support.tiny import load_thinker
from support.tiny_omni import TEXT, write_tiny_omni

from zoo.errors import UserError

LIMIT = 2e-5
ROPE = TEXT["rope_parameters"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


VARIANTS = [
    pytest.param({"decoder_sparse_step": 2}, id="every second layer dense"),
    pytest.param({"mlp_only_layers": [0, 1, 2, 3, 4]}, id="dense"),
    pytest.param({"mlp_only_layers": []}, id="experts in all layers"),
    pytest.param({"num_experts_per_tok": 3}, id="top 3"),
    pytest.param({"num_experts_per_tok": 1}, id="top 1"),
    pytest.param({"num_experts_per_tok": 1, "norm_topk_prob": False}, id="top 1, not normalised"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"attention_bias": True}, id="attention bias"),
    pytest.param({"norm_topk_prob": False}, id="norm_topk_prob"),
    pytest.param({"hidden_act": "gelu"}, id="hidden_act"),
    pytest.param({"rope_parameters": ROPE | YARN}, id="yarn"),
    pytest.param({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, id="linear rope"),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("text", VARIANTS)
def test_logits_or_an_error(text: dict, tmp_path: Path, cpu_world: Any, examples: dict[str, Example]) -> None:
    folder = write_tiny_omni(tmp_path, whole=False, **text).thinker
    try:
        zoo = Zoo.load(folder, cpu_world)
    except UserError:
        return
    hf = load_thinker(folder)
    rows = [examples[name] for name in ("image+video+audio", "audio_in_video-long", "text-long")]
    with torch.no_grad():
        wanted = [hf(**row.features).logits[0] for row in rows]
    for found, want in zip(zoo.logits(packed_batch([row.sample for row in rows])), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=LIMIT)
