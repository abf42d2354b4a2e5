"""Gemma 4's weights in and out again, bit for bit, and what its config.json may hold."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny import load_plain
from support.tiny_gemma4 import tiny_config, write_tiny_gemma4
from support.weights import differences, export, tensors

from zoo.errors import UserError
from zoo.models.gemma4.config import Gemma4Config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out(tied: bool, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Gemma4ForConditionalGeneration

    source = write_tiny_gemma4(tmp_path / "in", tied=tied)
    before, given = load_plain(source).state_dict(), tensors(source)
    assert ("lm_head.weight" in given) != tied
    out = export(Zoo.load(source, cpu_world, "model.family=gemma4"), tmp_path / "out", source)
    assert not differences(tensors(out), given)
    after, report = Gemma4ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report


def arch(**text: Any) -> dict[str, Any]:
    made: dict[str, Any] = tiny_config().to_dict()
    made["text_config"] |= text
    return made


def test_heads_of_full_layers_by_layer_or_as_the_hub_has_them() -> None:
    saved = arch()
    assert saved["text_config"]["per_layer_config"].keys() == {"1", "4"}
    hub = arch(global_head_dim=20, num_global_key_value_heads=2)
    del hub["text_config"]["per_layer_config"]
    found = [Gemma4Config.from_arch(one).text.full_heads for one in (saved, hub)]
    assert found[0] == found[1] and (found[0].width, found[0].groups) == (20, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "text_config.hidden_size_per_layer_input is 8: .*for each layer"),
        ({"num_kv_shared_layers": 2}, "text_config.num_kv_shared_layers is 2: .*of an earlier one"),
        ({"enable_moe_block": True}, "text_config.enable_moe_block is True: .*experts beside a dense MLP"),
        ({"attention_k_eq_v": False}, "text_config.attention_k_eq_v is False: .*values of their own"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"per_layer_config": {"1": {"head_dim": 24}, "4": {"head_dim": 20}}}, "the same for each"),
        ({"per_layer_config": {"0": {"head_dim": 24}}}, "heads of the full layers|head_dim and num_key"),
        ({"per_layer_config": {"1": {"hidden_size": 24}, "4": {"hidden_size": 24}}}, "wanted head_dim and"),
    ],
)
def test_what_is_refused(text: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Gemma4Config.from_arch(arch(**text))
