"""A talker in a plan: its parameters by hand, and what a spoken row costs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zoo.config.compose import load_recipe
from zoo.data.media.sizes import SampleSize
from zoo.model.build import assemble
from zoo.packing.cost import TALKER
from zoo.parallel.megatron.core_import import import_core
from zoo.planner.memory import inputs_on_host
from zoo.planner.plan import model_of, plan
from zoo.planner.sample_costs import training_cost

ROWS = {"video_fps": 2.0, "max_frames": 8}


def qwen3_by_hand(text: Any, predictor: Any, thinker: int) -> int:
    """Weights of a published talker: projections with biases, decoder with a shared expert, code predictor with a table and a head for each residual code."""
    wide, inner, books = text["hidden_size"], text["intermediate_size"], predictor["num_code_groups"] - 1
    projection = thinker * inner + inner + inner * wide + wide
    experts = 3 * wide * text["moe_intermediate_size"] * text["num_experts"] + text["num_experts"] * wide
    shared = 3 * wide * text["shared_expert_intermediate_size"] + wide
    layer = attention(text) + experts + shared + 2 * wide
    talker = text["num_hidden_layers"] * layer + wide + 2 * text["vocab_size"] * wide
    dense = attention(predictor) + 3 * wide * predictor["intermediate_size"] + 2 * wide
    return (
        2 * projection + talker
        + predictor["num_hidden_layers"] * dense + wide + 2 * books * predictor["vocab_size"] * wide
    )  # fmt: skip


def attention(text: Any) -> int:
    """Queries, keys, values, the way out, and the norms of queries and keys."""
    queries, keys = (text[f"num_{name}_heads"] * text["head_dim"] for name in ("attention", "key_value"))
    return text["hidden_size"] * (2 * queries + 2 * keys) + 2 * text["head_dim"]


@pytest.mark.parametrize(("recipe", "joint"), [("qwen3_omni_talker_sft", False), ("qwen3_omni_speech_sft", True)])
def test_parameters_of_the_published_talker(recipe: str, joint: bool) -> None:
    planned = plan(recipe, 1, overrides=["size=30b-a3b"])
    arch = load_recipe(recipe, ["size=30b-a3b"]).model.arch
    talker = arch["talker_config"]
    wanted = qwen3_by_hand(talker["text_config"], talker["code_predictor_config"], 2048)
    assert planned.parameters[TALKER] == wanted == 3_324_596_480
    assert planned.trained == (sum(planned.parameters.values()) if joint else wanted)
    assert planned.step[TALKER] > 0 and planned.forward["head"] * joint == planned.forward["head"]
    if not joint:  # which ends at the layer that is read, and has no backward pass
        whole = plan("qwen3_omni_speech_sft", 1, overrides=["size=30b-a3b"])
        assert 2 * planned.forward["decoder"] == pytest.approx(whole.forward["decoder"])
        rows = planned.recipe.train.global_batch
        assert planned.step["decoder"] == pytest.approx(rows * planned.forward["decoder"])


def test_more_frames_cost_a_plan_more() -> None:
    few, many = (plan("qwen3_omni_talker_sft", 1, overrides=["size=30b-a3b"], frames=number) for number in (1.0, 4.0))
    assert sum(many.row.media[TALKER]) == pytest.approx(4 * sum(few.row.media[TALKER]))
    assert many.worst.activations > 2 * few.worst.activations and many.step[TALKER] > 2 * few.step[TALKER]


def test_the_talker_is_on_the_last_stage() -> None:
    import_core()
    from zoo.planner.parameters import share

    recipe = load_recipe("qwen3_omni_talker_sft", ["size=30b-a3b"]).replace({"parallel.pp": 2, "parallel.ep": 2})
    model = model_of(recipe)
    first, last = (share(model.parameters, recipe, stage) for stage in (0, 1))
    assert first.trained_dense == first.trained_experts == 0
    experts = 20 * 3 * 1024 * 384 * 128
    assert (last.trained_dense, last.trained_experts) == (model.parameters.trained - experts, experts // 2)


@pytest.mark.parametrize("family", ["qwen3_omni", "qwen25_omni"])
def test_frames_count_in_a_samples_cost(family: str) -> None:
    recipe = load_recipe(f"{family}_talker_sft", ["size=tiny"])
    config = assemble(recipe).config
    cost = training_cost(config, recipe)
    said = [cost(SampleSize(30, {TALKER: [frames]})) for frames in (5, 50, 100)]
    assert said[1] > 1.5 * said[0] and said[2] - said[1] > 50 / 45 * (said[1] - said[0])
    assert training_cost(config, load_recipe(f"{family}_sft", ["size=tiny"]))(SampleSize(30)) > 0
    whole = training_cost(config, recipe.replace({"engine.recompute": "full"}))
    frozen = training_cost(config, recipe.replace({"lora.rank": 4, "lora.parts": [TALKER]}))
    size = SampleSize(30, {TALKER: [100]})
    assert frozen(size) < cost(size) < whole(size)


def test_measuring_a_row_counts_the_frames_that_encoding_gives(tmp_path: Path) -> None:
    from zoo.data.sources.references import Access
    from zoo.data.sources.rows import make_row

    recipe = load_recipe("qwen3_omni_talker_sft", ["size=tiny"])
    processor = assemble(recipe).processor
    np.save(tmp_path / "codes.npy", np.zeros((7, 4), dtype=np.int32))
    for speech in ("codes.npy", [[1, 2, 3, 4]] * 7):
        item = {
            "messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "ab"}],
            "speech": speech,
        }
        row = make_row(item | {"speaker": "ethan"}, "here", Access(tmp_path))
        assert processor.measure(row, **ROWS) == processor.size(processor.encode(row, **ROWS))
        assert processor.measure(row, **ROWS).media[TALKER] == [7]


def test_a_talker_alone_keeps_no_input_of_its_thinker_on_the_host() -> None:
    kept = ["size=30b-a3b", "engine.recompute=full", "engine.offload_activations=true"]
    alone, joint = (plan(f"qwen3_omni_{task}_sft", 1, overrides=kept) for task in ("talker", "speech"))
    layers = load_recipe("qwen3_omni_talker_sft", kept).model.arch["talker_config"]["text_config"]["num_hidden_layers"]
    model = model_of(alone.recipe)
    assert model.talker is not None and len(model.talker.kinds) == layers
    of_talker = inputs_on_host(model, alone.recipe, alone.row, 0)
    of_both = inputs_on_host(model_of(joint.recipe), joint.recipe, joint.row, 0)
    assert 0 < of_talker < of_both / 2
