"""What is special to Gemma 4: images that see themselves both ways, heads of full layers, unscaled attention."""

from typing import Any

import pytest
import torch
from support.families import pair_of
from support.pairs import Pair, worst
from support.tiny_gemma4 import tiny_config

from zoo.models.gemma4.config import Gemma4Config

pair = pair_of("gemma4")


def test_rows_outgrow_the_window_and_images_differ_in_size(pair: Pair) -> None:
    patches = pair.examples["three"].sample.media["image_grids"].prod(dim=1).tolist()
    assert len(set(patches)) == 3, "so that some are padded"
    assert pair.hf.config.text_config.sliding_window < min(e.length for e in pair.examples.values())


def test_an_image_sees_itself_both_ways_in_sliding_layers_alone(pair: Pair) -> None:
    """So that the tests above can see where it does not: transformers' own causal logits are others."""
    example = pair.examples["wide"]
    causal = {name: x for name, x in example.features.items() if name != "mm_token_type_ids"}
    with torch.no_grad():
        other = pair.hf(**causal).logits[0]
    assert worst([other], [pair.logits[0]]) > 0.01


def test_logits_of_attention_begin_with_a_spread_of_one(cpu_world: Any) -> None:
    """As where they are divided by sqrt(D), which Gemma 4's are not: from wider ones little is learnt."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.model import build

    recipe = validate(load_recipe("gemma4_sft", ["size=tiny", "hardware=cpu", "engine.threads=1"]), 1)
    (model,) = build.build_model(build.assemble(recipe), recipe, cpu_world)
    draw = torch.Generator().manual_seed(0)

    def spread(query: Any, key: Any) -> float:
        """The standard deviation of the scores of (tokens, 1, heads, D) and (tokens, 1, groups, D)."""
        return float(torch.einsum("qbhd,kbgd->hgqk", query, key).std())

    hidden, patches = (torch.randn(64, 1, width, generator=draw) for width in (128, 64))
    with torch.no_grad():
        for layer in model.decoder.layers:
            query, key, *_ = layer.self_attention.get_query_key_value_tensors(hidden)
            assert spread(query, key) == pytest.approx(1, abs=0.2)
        for layer in model.vision.encoder.layers:
            one, heads = layer.self_attn, (64, 1, -1, 16)
            query, key = (
                getattr(one, f"{name}_norm")(getattr(one, f"{name}_proj")(patches).view(heads)) for name in "qk"
            )
            assert spread(query, key) == pytest.approx(1, abs=0.2)


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
