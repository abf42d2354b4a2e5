"""Every key of transformers' configs of every family is used, refused, or left unread by both; numbers have bounds."""

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.config_keys import (
    CASES,
    PARTS,
    Arch,
    changed,
    config_class,
    has_part,
    keys,
    made_of,
    plain_logits,
    text_part,
    tiny_arch,
)

from zoo.config.architecture import check_arch
from zoo.errors import UserError
from zoo.registry import get_family

# Keys that change neither zoo's model nor transformers' logits, and why. Where part and case are named, elsewhere they do.
IGNORED = {
    key: reason
    for keys, reason in {
        "transformers_version": "says who wrote the file",
        "architectures": "says which class wrote it; model_type decides",
        "dtype": "of the file; engine.precision says in what a run computes",
        "id2label label2id problem_type": "of classifiers",
        "is_encoder_decoder": "of other models",
        "chunk_size_feed_forward": "of models of transformers that cut their MLP; the result is the same",
        "return_dict output_hidden_states output_router_logits": "what transformers hands back; train.aux_loss is ours",
        "use_cache bos_token_id eos_token_id vision_start_token_id": "of generation",
        "pad_token_id": "of generation, and no gradient for padding, which no sample holds",
        "vision_end_token_id image_start_token_id image_end_token_id audio_end_token_id": "of processors",
        "boi_token_index eoi_token_index boi_token_id eoi_token_id boa_token_id eoa_token_index": "of processors",
        "image_seq_length": "of processors",
        "user_token_id": "of the talker",
        "seconds_per_chunk": "of processors, whose order of sound among frames the positions follow",
        "attn_logit_softcapping": "Gemma 3's attention in transformers does not read it",
        "final_logit_softcapping": "transformers' class with images does not read it",
        "max_position_embeddings": "of rotary embeddings that are stretched beyond it: refused",
        "pretraining_tp": "of an older Llama; the model of today has none",
        "router_aux_loss_coef": "train.aux_loss takes its place",
        "use_sliding_window max_window_layers text_config.sliding_window": "of windows, together: parity/test_long_contexts.py",
        "audio_config.conv_chunksize": "how many chunks a call takes; the result is the same",
        "vision_config.projection_dim": "of CLIP's other half",
        "text_config.tie_word_embeddings": "the level above says it, which LLaVA 1.5 and OneVision take from here",
        "initializer_range": "the whole's: initial weights have the parts' own",
        "timestamp_token_id token_classification_bias": "of the forced aligner",
        "vocab_size_per_layer_input use_double_wide_mlp": "of smaller Gemma 4: refused",
        "top_k_experts text_config.num_experts text_config.moe_intermediate_size": "of Gemma 4 with experts: refused",
        "vision_config.attention_bias": "Gemma 4's tower in transformers does not read it",
        "video_token_id audio_token_id": "of rows that Gemma 4's processor here does not take",
    }.items()
    for key in keys.split()
}
USED_IN = {  # of the above, where they are used all the same
    "text_config.tie_word_embeddings": {
        "llava", "llava_onevision", "glm4v_moe", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_next",
        "qwen3_5_text", "qwen3_5_moe_text",
    },
    "final_logit_softcapping": {"gemma3_text", "gemma4"},
    "vision_start_token_id": {"qwen3_omni_moe_thinker"},
    "audio_config.max_position_embeddings": {"qwen3_asr"},
    "text_config.sliding_window": {"gemma3", "gemma3_text", "gemma4", "llava_next"},
    **dict.fromkeys(
        ("video_token_id", "audio_token_id", "vision_config.attention_bias", "text_config.num_experts",
         "text_config.moe_intermediate_size"), CASES.keys() - {"gemma4"},
    ),
}  # fmt: skip
OWN_VALUES: dict[str, list[Any]] = {  # where doubling and the like say nothing
    "transformers_version": ["4.0.0"],
    "architectures": [["SomethingElse"]],
    "tie_word_embeddings": [True, False],
    "model_type": ["qwen3_omni", "bert"],
    "vision_feature_select_strategy": ["full", "default", "x"],
    "vision_aspect_ratio": ["anyres_max_9", "anyres", "anyres_max_0", "anyres_max_" + "9" * 5000],
    "mlp_only_layers": [[0], [1, 2]],
    "fullatt_block_indexes": [[0], [0, 1, 2]],
    "attn_logit_softcapping": [30.0],
    "final_logit_softcapping": [30.0],
    "window_size": [96, 32],
    "image_grid_pinpoints": [[[32, 32]], [[26, 26]], [], [[7, 9]]],
    "dtype": ["bfloat16", "float64", "no such type"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "layer_types": [["linear_attention"], ["full_attention"] * 7, ["sliding_attention"] * 3, ["mamba"] * 4],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        {"rope_type": "default", "rope_theta": 777.0},
        {"rope_type": "default", "rope_theta": None},
        {"full_attention": {"rope_type": "default", "rope_theta": 777.0}},
        {"type": "dynamic", "factor": 2.0, "rope_theta": 1.1e4},
    ],
    "vision_feature_layer": [1, -2, [1, 2], [], 0, 99],
    "image_size": [64, [64, 64], [32, 64], []],
    "patch_size": [4, [4, 4], [4, 8], []],
    "norm_type": ["rms_norm", "layer_norm", "batch_norm"],
    "downsample_ratio": [1.0, 0.25, 0.3],
    "sliding_window": [100, 1],
    "use_bidirectional_attention": ["all"],
    "audio_config": [{"model_type": "gemma4_audio"}],
}
NESTED = [case for case in CASES if text_part(case)]
PLACES = [(case, part) for case in CASES for part in PARTS if has_part(case, part)]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def base(case: str) -> dict[str, Any]:
    return made_of(case, tiny_arch(case))


def is_ignored(case: str, part: str, key: str) -> bool:
    part = part or ("text_config" if case not in NESTED else "")
    name = f"{part}.{key}" if part else key
    if case in USED_IN.get(name, ()):
        return False
    for known in (name, key):
        if known in IGNORED and case not in USED_IN.get(known, ()):
            return not (known == "initializer_range" and part)  # the parts' own is used
    return False


def other_values(key: str, value: Any) -> list[Any]:
    if key in OWN_VALUES:
        return OWN_VALUES[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1]
    if isinstance(value, float):
        return [value * 2 + 0.01]
    if isinstance(value, str):
        return ["relu", "no such thing"]
    if isinstance(value, list | tuple):
        return [list(value)[::-1], list(value)[:-1], [*value, *value]]
    return [3]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("case", "part"), PLACES)
def test_every_key_is_used_or_refused_or_in_the_list(case: str, part: str) -> None:
    arch, silent, loud = tiny_arch(case), [], []
    for key, value in keys(case, part):
        if key in ("text_config", "vision_config", "audio_config"):
            continue  # a place of its own
        outcomes = set()
        for other in other_values(key, value):
            if other == value or (False in outcomes and not is_ignored(case, part, key)):
                continue
            try:
                outcomes.add(made_of(case, changed(arch, part, key, other)) != base(case))
            except UserError as error:
                assert "\n" not in str(error), error
                outcomes.add(True)
        assert outcomes, f"{key}: no other value was tried"
        if is_ignored(case, part, key):
            loud += [key] if outcomes == {True} else []
        else:
            silent += [key] if False in outcomes else []
    assert not silent, f"changed without effect, and in no list: {silent}"
    assert not loud, f"in the list of what nobody reads, but read: {loud}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_transformers_ignores_what_is_in_the_list(case: str) -> None:
    arch, count = tiny_arch(case), 0
    wanted = plain_logits(case, arch)
    for part in {"", text_part(case)}:
        for key, value in keys(case, part):
            if not is_ignored(case, part, key) or key in (
                "dtype", "return_dict", "problem_type", "use_sliding_window",
            ):  # fmt: skip
                continue
            if (case, key) == ("internvl with experts", "output_router_logits"):
                continue  # in transformers 5.24 its model breaks on it
            arch, count = changed(arch, part, key, other_values(key, value)[0]), count + 1
    assert count > 10
    torch.testing.assert_close(plain_logits(case, arch), wanted, rtol=0, atol=0)
    made = made_of(case, arch)
    assert {key for key in made if made[key] != base(case)[key]} == set()


# Keys of other families' decoders, and of published files, which transformers keeps and its models never look at.
STRAYS: dict[str, Any] = {
    "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 11, "shared_expert_intermediate_size": 13,
    "norm_topk_prob": False, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2, "mlp_bias": True,
    "use_sliding_window": True, "sliding_window": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 7,
    "linear_key_head_dim": 6, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
    "attn_output_gate": False, "mamba_ssm_dtype": "float16", "partial_rotary_factor": 0.5, "qk_norm": False,
    "deepstack_visual_indexes": [0], "tie_word_embeddings": True, "zero_centered": False, "mtp_num_hidden_layers": 2,
    "residual_multiplier": 3.0, "router_jitter_noise": 0.5,
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_keys_that_a_config_does_not_have_change_neither_model(case: str) -> None:
    arch = tiny_arch(case)
    there = {field.name for field in dataclasses.fields(config_class(case, text_part(case)))}
    own = {"mtp_num_hidden_layers", "partial_rotary_factor"} if case.startswith("qwen3_5") else set()
    own |= {"partial_rotary_factor"} if case.startswith("gemma3") else set()  # breaks transformers' linear scaling
    own |= {"partial_rotary_factor"} if case == "qwen3_next" else set()
    if case in ("llava", "llava_onevision", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_asr"):
        own |= {"tie_word_embeddings"}
    strays = {key: value for key, value in STRAYS.items() if key not in there | own}
    assert len(strays) > 10
    stray = copy.deepcopy(arch)
    text = stray.get("text_config", stray)
    if "layer_types" not in there:
        strays["layer_types"] = ["linear_attention"] * text["num_hidden_layers"]
    text |= strays
    if has_part(case, "vision_config"):
        vision = {field.name for field in dataclasses.fields(config_class(case, "vision_config"))}
        strays = {"deepstack_visual_indexes": [0]}
        stray["vision_config"] |= {k: v for k, v in strays.items() if k not in vision}
    made = made_of(case, stray)
    assert {key for key in made if made[key] != base(case)[key]} == set()
    torch.testing.assert_close(plain_logits(case, stray), plain_logits(case, arch), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "part", "key", "value"),
    [
        (case, part, key, value)
        for key, value in (
            ("per_layer_config", {"1": {"head_dim": 8}}),
            ("is_causal", False),
            ("attention_dropout", 0.1),
        )
        for case in CASES
        for part in (text_part(case), *(["tower"] if "dropout" in key and case in NESTED else []))
    ],
)
def test_what_transformers_takes_and_no_model_here_has(part: str, key: str, value: Any, case: str) -> None:
    if part == "tower":
        part = next(part for part in ("vision_config", "audio_config") if has_part(case, part))
    with pytest.raises(UserError, match=key):
        made_of(case, changed(tiny_arch(case), part, key, value))


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("qwen3", "num_key_value_heads", 4),
        ("qwen3", "hidden_act", "gelu_fast"),
        ("llava", "mlp_bias", True),
        (
            "qwen3",
            "rope_parameters",
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]},
        ),
        ("qwen3_moe", "num_experts_per_tok", 99),
        ("qwen3_next", "attention_dropout", 0.1),
        ("qwen3_vl_moe", "num_experts_per_tok", 99),
    ],
)
def test_messages_name_keys_of_the_decoder_as_they_stand_in_the_file(case: str, key: str, value: Any) -> None:
    part = text_part(case)
    with pytest.raises(UserError) as caught:
        made_of(case, changed(tiny_arch(case), part, key, value))
    assert str(caught.value).startswith(f"{part}.{key}" if part else key)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"])
def test_the_gate_of_linear_attention_is_the_one_that_is_built(case: str) -> None:
    """Qwen3.8 states it as a key that transformers' class does not have."""
    arch, part = tiny_arch(case), text_part(case)
    assert made_of(case, changed(arch, part, "output_gate_type", "swish")) == base(case)
    for other in ("sigmoid", "", 3, []):
        with pytest.raises(UserError, match="output_gate_type is"):
            made_of(case, changed(arch, part, "output_gate_type", other))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("case", NESTED)
def test_who_says_whether_the_head_is_the_embedding(case: str, inner: bool, tied: bool) -> None:
    from transformers import CONFIG_MAPPING

    arch = changed(tiny_arch(case), "text_config", "tie_word_embeddings", inner)
    arch["tie_word_embeddings"] = tied
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, CASES[case].kind)(
            CONFIG_MAPPING[arch["model_type"]].from_dict(copy.deepcopy(arch))
        )
    model.tie_weights()
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert made_of(case, arch)["tied"] == same


def numbers(case: str, part: str) -> Iterator[str]:
    """Keys of a part's class that are numbers, alone or in a list."""
    for field in dataclasses.fields(config_class(case, part)):
        if any(kind in str(field.type) for kind in ("int", "float")) and "dict" not in str(field.type):
            yield field.name


LISTED = (
    "eos_token_id", "vision_feature_layer", "image_size", "patch_size", "mlp_only_layers", "deepstack_visual_indexes",
    "fullatt_block_indexes",
)  # fmt: skip
HOSTILE = [10**9, 10**12, 10**400, -(10**12), 1e308, float("nan"), float("inf"), "64", True, {}, {"a": 1}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "part"), PLACES)
def test_numbers_have_bounds_and_types(case: str, part: str) -> None:
    """All that is refused is refused before transformers sees it: nothing is built, nothing loops."""
    arch = tiny_arch(case)
    for key in numbers(case, part):
        hostile = [value for value in HOSTILE if not (key.endswith(("_token_id", "_index")) and value == 10**9)]
        if key in ("max_position_embeddings", "conv_chunksize", "chunk_size_feed_forward", "sliding_window"):
            hostile.remove(10**9)
        for value in [*hostile, [], ["64"], [[1]], [10**12]]:
            if key in LISTED and value == []:
                continue
            with pytest.raises(UserError) as caught:
                check_arch(changed(arch, part, key, value))
            assert key in str(caught.value) and "\n" not in str(caught.value), caught.value
            assert len(str(caught.value)) < 300


@pytest.mark.sampled(12)
@pytest.mark.parametrize("value", [None, [], "x", 3, True])
@pytest.mark.parametrize(
    ("case", "key"), [(case, key) for case in NESTED for key in ("text_config", "vision_config") if has_part(case, key)]
)
def test_nested_configs_are_objects(key: str, value: Any, case: str) -> None:
    config = get_family(CASES[case].name).load("config")
    with pytest.raises(UserError, match=f"{key} is .*wanted an object"):
        config.from_arch({**tiny_arch(case), key: value})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_thinker_that_is_none(value: Any) -> None:
    config = get_family("qwen3_omni").load("config")
    with pytest.raises(UserError, match=r"thinker_config is .*wanted an object"):
        config.from_arch({"model_type": "qwen3_omni_moe", "thinker_config": value})
    for nothing in (None, [], "x"):
        with pytest.raises(UserError, match="wanted a JSON object"):
            config.from_arch(nothing)


def test_published_sizes_lie_far_within_the_bounds() -> None:
    arch: Arch = tiny_arch("qwen3_5_moe")
    arch["text_config"] |= {"num_hidden_layers": 120, "num_experts": 1024, "layer_types": None}
    check_arch(arch)
    arch["text_config"] |= {"num_hidden_layers": 1000, "num_experts": 8000}
    with pytest.raises(UserError, match="1000 layers of 8000 experts"):
        check_arch(arch)


SECTIONS = [[11, 11, 11], [4, 3], [], [0, 0, 10], [-1, 6, 5], [10, 0], [1, 5, 4], "x", [2.0, 4, 4], None, [[4]]]


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize(
    "case", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_omni_moe_thinker", "qwen2_5_omni_thinker"]
)
def test_mrope_sections_that_do_not_fit(case: str, sections: Any) -> None:
    arch = tiny_arch(case)
    arch["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(UserError, match="mrope_section is") as caught:
        made_of(case, arch)
    assert "\n" not in str(caught.value)
