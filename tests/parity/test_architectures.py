"""Every family with other sizes and settings: logits are those of transformers and, where embeddings are tied, every gradient; what zoo lacks is refused."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import packed_batch
from support.families import FAMILIES
from support.pairs import worst
from support.tiny import ROPE, TEXT
from support.tiny_gemma3 import FULL, SLIDING
from support.tiny_gemma3 import ROPE as BOTH_ROPES
from support.tiny_glm45v import SECTIONS as HALF
from support.tiny_internvl import LARGE
from support.tiny_llava import CLIP, MISTRAL, QWEN2, SIGLIP
from support.tiny_qwen3_next import ROPE as NEXT_ROPE
from support.tiny_qwen25_vl import SECTIONS
from support.tiny_qwen35 import LINEAR
from support.tiny_qwen35 import TEXT as HYBRID

from zoo.errors import UserError
from zoo.registry import get_family

MROPE, PARTIAL = TEXT["rope_parameters"], HYBRID["rope_parameters"]
KEYS = {"one key head": {"num_key_value_heads": 1}, "epsilon": {"rms_norm_eps": 1e-2}}
COMMON = KEYS | {"no grouped queries": {"num_key_value_heads": 6}}


def theta(rope: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"theta": {"rope_parameters": rope | {"rope_theta": 500.0}}}


def tower(**settings: Any) -> dict[str, Any]:
    return {"vision": settings}


def audio(**settings: Any) -> dict[str, Any]:
    return {"audio": settings}


OTHER_SECTIONS = {"other sections": {"rope_parameters": SECTIONS | {"mrope_section": [0, 8, 1]}}}
AXIAL = {"rope_parameters": {"rope_type": "axial", "rope_theta": 99.0}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl": COMMON
    | theta(MROPE)
    | {"small heads": {"head_dim": 12, "rope_parameters": MROPE | {"mrope_section": [2, 2, 2]}}},
    "qwen3_vl experts": {
        "top 3": {"num_experts_per_tok": 3},
        "experts in all layers": {"mlp_only_layers": []},
        "every second layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    },
    "qwen35_vl": COMMON
    | theta(PARTIAL)
    | {
        "full attention alone": {"layers": (FULL, FULL, FULL)},
        "another order of layers": {"layers": (FULL, LINEAR, LINEAR, LINEAR, FULL)},
        "as many value heads as key heads": {"linear_num_value_heads": 4},
        "one linear key head": {"linear_num_key_heads": 1},
        "a short convolution": {"linear_conv_kernel_dim": 2},
        "whole heads rotated": {
            "rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0, "mrope_section": [4, 3, 3]}
        },
        "experts of a dense model": {"num_experts": 4, "num_experts_per_tok": 2},
    },
    "qwen35_vl experts": {
        "top 3": {"num_experts_per_tok": 3},
        "another order of layers": {"layers": (FULL, LINEAR)},
        "keys of other experts, which transformers ignores": {
            "norm_topk_prob": False,
            "mlp_only_layers": [0, 1],
            "decoder_sparse_step": 2,
        },
    },
    "qwen3_omni": COMMON
    | theta(MROPE)
    | {
        "every second layer dense": {"decoder_sparse_step": 2},
        "dense": {"mlp_only_layers": [0, 1, 2, 3, 4]},
        "experts in all layers": {"mlp_only_layers": []},
        "top 3": {"num_experts_per_tok": 3},
        "top 1, not normalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
        "experts' weights as they are": {"norm_topk_prob": False},
    },
    "llava": {
        "several layers": {"vision_feature_layer": [-2, 1, -1]},
        "layer counted from the front": {"vision_feature_layer": 3},
        "with the class": {"vision_feature_select_strategy": "full"},
        "projector": {"multimodal_projector_bias": False, "projector_hidden_act": "relu"},
        "SigLIP in 1.5": {"vision": SIGLIP, "vision_feature_select_strategy": "full"},
        "Qwen2 in 1.5": {"text": QWEN2 | {"num_key_value_heads": 6}},
    },
    "llava_next": {
        "Llama": {"text": {"model_type": "llama", "rope_parameters": ROPE | {"rope_theta": 300.0}}},
        "several layers of tiles": {"vision_feature_layer": [-1, 2]},
        "a window that is not reached": {"text": MISTRAL | {"sliding_window": 4096}},
    },
    "llava_onevision": {
        "nine tiles at most": {"vision_aspect_ratio": "anyres_max_9"},
        "a pooling head that is not used": tower(vision_use_head=True),
        "CLIP": {"vision": CLIP | {"image_size": 26}, "vision_feature_select_strategy": "default"},
    },
    "internvl": {
        "one embedding a tile": {"downsample_ratio": 0.25},
        "every patch": {"downsample_ratio": 1.0, "projector_hidden_act": "relu"},
        "a norm behind the tower": tower(use_mean_pooling=False),
        "no positions": tower(use_absolute_position_embeddings=False),
        "a rest of pixels": tower(image_size=38),
    },
    "internvl qwen2": {"biases before norms": {"vision": LARGE | {"attention_bias": True}}},
    "internvl experts": {"experts' weights as they are": {"text": {"norm_topk_prob": False}}},
    "qwen25_vl": COMMON
    | theta(SECTIONS)
    | OTHER_SECTIONS
    | {
        "windows in all layers": tower(fullatt_block_indexes=[]),
        "no windows": tower(fullatt_block_indexes=[0, 1, 2, 3, 4]),
        "a layer twice, and one that is none": tower(fullatt_block_indexes=[4, 9, 4]),
        "windows of one embedding": tower(window_size=47),
        "windows of three": tower(window_size=100),
        "windows larger than images": tower(window_size=1024),
        "another clock": tower(tokens_per_second=25),
        "tower's theta": tower(**AXIAL),
    },
    "qwen3_asr": COMMON
    | theta(ROPE)
    | {
        "windows of one chunk": audio(n_window_infer=100),
        "windows that cut a chunk count as whole ones": audio(n_window_infer=250),
        "windows longer than clips": audio(n_window_infer=800),
        "more mel bins": audio(num_mel_bins=128),
        "activation of layers and projector": audio(activation_function="relu"),
        "a key that transformers' encoder reads in vain": audio(scale_embedding=True),
    },
    "qwen25_omni": KEYS
    | theta(SECTIONS)
    | OTHER_SECTIONS
    | {
        "windows in all layers": tower(fullatt_block_indexes=[]),
        "windows of one embedding": tower(window_size=47),
        "another clock": {"clock": 13},
        "chunks of 14 frames": audio(n_window=7),
        "chunks longer than clips": audio(n_window=400),
        "audio heads": audio(encoder_attention_heads=3),
        "heads as wide as the hidden size says": {"hidden_size": 108, "head_dim": None},
    },
    "gemma3": {
        "no windows": {"layer_types": [FULL] * 5},
        "windows in all layers": {"layer_types": [SLIDING] * 5},
        "a token sees itself alone": {"sliding_window": 1},
        "windows shorter than an image": {"sliding_window": 3},
        "windows longer than rows": {"sliding_window": 4096},
        "another scale": {"query_pre_attn_scalar": 300},
        "no grouped queries": {"num_key_value_heads": 6},
        "epsilon": {"rms_norm_eps": 1e-2},
        "SiLU": {"hidden_activation": "silu"},
        "angles swapped": {"rope_parameters": {FULL: BOTH_ROPES[SLIDING], SLIDING: BOTH_ROPES[FULL]}},
        "no pooling": {"top": {"mm_tokens_per_image": 16}},
        "one token an image": {"top": {"mm_tokens_per_image": 1}},
        "SigLIP's head, which nothing uses": tower(vision_use_head=True),
    },
    "gemma3_text": {
        "no cap": {"final_logit_softcapping": None},
        "no windows": {"layer_types": [FULL] * 5},
        "windows in all layers": {"layer_types": [SLIDING] * 5, "sliding_window": 3},
        "one key head": {"num_key_value_heads": 1},
    },
    "gemma4": {
        "windows longer than an image": {"sliding_window": 90},
        "one full layer, the last": {"layer_types": [SLIDING] * 4 + [FULL]},
        "no windows": {"layer_types": [FULL] * 5},
        "images seen as text is": {"use_bidirectional_attention": None},
        "logits without a cap": {"final_logit_softcapping": None},
        "a tower's outputs as they are": tower(standardize=False),
    },
    "qwen3": COMMON | theta(ROPE) | {"experts of a dense model": {"num_experts": 4, "num_experts_per_tok": 2}},
    "qwen3 experts": {
        "top 3": {"num_experts_per_tok": 3},
        "experts' weights as they are": {"norm_topk_prob": False},
        "every other layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    },
    "qwen3_next": KEYS
    | {
        "full attention alone": {"layers": (FULL, FULL, FULL)},
        "another order of layers": {"layers": (FULL, LINEAR, LINEAR, FULL)},
        "as many value heads as key heads": {"linear_num_value_heads": 4},
        "one linear key head": {"linear_num_key_heads": 1},
        "four value heads to a key head": {"linear_num_key_heads": 2},
        "whole heads rotated": {"rope_parameters": NEXT_ROPE | {"partial_rotary_factor": 1.0}},
        "experts alone, top 3": {"mlp_only_layers": [], "num_experts_per_tok": 3},
        "experts' weights as they are": {"norm_topk_prob": False},
        "every other layer": {"decoder_sparse_step": 2},
    },
    "qwen35_text": KEYS
    | theta(PARTIAL)
    | {"full attention alone": {"layers": (FULL, FULL, FULL)}, "one linear key head": {"linear_num_key_heads": 1}},
    "qwen35_text experts": {
        "top 3": {"num_experts_per_tok": 3},
        "another order of layers": {"layers": (FULL, LINEAR)},
        "one shared expert, of another width": {"shared_expert_intermediate_size": 22},
    },
    "glm45v": KEYS
    | theta(HALF)
    | {
        "one group, as published": {"n_group": 1, "topk_group": 1},
        "all groups": {"topk_group": 3},
        "five experts a token": {"num_experts_per_tok": 5, "n_group": 1, "topk_group": 1},
        "one shared expert, other scale": {"n_shared_experts": 1, "routed_scaling_factor": 0.4},
        "experts in all layers": {"first_k_dense_replace": 0},
        "no biases": {"attention_bias": False},
        "whole heads turn": {"rope_parameters": HALF | {"partial_rotary_factor": 1.0, "mrope_section": [4, 3, 3]}},
        "places of 2 x 2 patches": tower(image_size=40),
        "places of 21 x 21 patches": tower(image_size=336),
        "biases in the tower": tower(attention_bias=True),
        "an embedding a patch": tower(spatial_merge_size=1),
        "another activation": tower(hidden_act="gelu"),
        "tower's theta": tower(**AXIAL),
    },
}
CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_other_architectures(family: str, variant: str, tmp_path: Path, cpu_world: Any) -> None:
    budget = ("packing.budget=4096",) if family.startswith("llava") else ()
    pair = FAMILIES[family].pair(tmp_path, cpu_world, *budget, seed=1, **VARIANTS[family][variant])
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * pair.logits_limit
    if family.startswith(("llava", "internvl", "gemma4")):
        _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
        assert max(pair.errors(gradients).values()) < 2 * pair.gradients_limit


EITHER = ("experts", "next", "qwen2")  # one of a family's variants is enough
TIED = [name for name in FAMILIES if name != "llava" and not name.endswith(EITHER)] + ["qwen3_next"]


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_vl", "qwen3_omni"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in TIED if name not in ("qwen3_vl", "qwen3_omni")),
    ],
)
def test_tied_embeddings(family: str, tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are about six times larger, and their gradient has two sources."""
    config = {"text": {"tie_word_embeddings": True}} if family == "llava_onevision" else {}
    pair = FAMILIES[family].pair(tmp_path, cpu_world, seed=1, tied=True, **config)
    assert pair.zoo.assembly.config.tied
    assert pair.hf.get_output_embeddings().weight is pair.hf.get_input_embeddings().weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * pair.logits_limit
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    assert max(pair.errors(gradients).values()) < 2 * pair.gradients_limit


GPT_OSS = {  # of InternVL3_5-GPT-OSS-20B-A4B-Preview
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12,
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
# Keys of a config.json that differ, of parts and of the whole, and what is said of them.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen3_vl": [
        ({"vision_config": {"deepstack_visual_indexes": [0, 5]}}, r"would never learn.*0 to 4"),
        ({"vision_config": {"deepstack_visual_indexes": [1, 1]}}, r"would never learn.*0 to 4"),
        ({"vision_config": {"deepstack_visual_indexes": [0, -1]}}, r"would never learn.*0 to 4"),
        ({"text_config": {"num_hidden_layers": 2}}, "at most 2, as the decoder has layers"),
    ],
    "qwen3": [({"layer_types": [SLIDING] * 5}, "sliding_window is None; wanted 1 or more")],
    "qwen3_omni": [
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act"),
        ({"text_config": {"num_experts_per_tok": 1}}, "the router would get no gradient"),
    ],
    "qwen3_vl experts": [
        ({"text_config": {"moe_intermediate_size": 22}}, "moe_intermediate_size is 22 and hidden_size 44"),
        ({"text_config": {"moe_intermediate_size": 44}}, "would not turn square ones"),
    ],
    "internvl": [
        (
            {"text_config": GPT_OSS},
            "text_config.model_type is 'gpt_oss', whose attention sinks, experts with biases and .* lacks; .* qwen3_moe only",
        ),
        ({"text_config": {"model_type": "gemma"}}, "'gemma'; InternVL here has qwen2"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2; InternVL here has -1 only"),
        ({"vision_feature_select_strategy": "full"}, "strategy is 'full'; InternVL here has 'default' only"),
        ({"vision_config": {"use_mask_token": True}}, "use_mask_token is True"),
        ({"vision_config": {"norm_type": "batch_norm"}}, "is 'batch_norm'; wanted layer_norm or rms_norm"),
        ({"vision_config": {"image_size": [32, 64]}}, r"image_size is \[32, 64\]; .* pair of equal ones"),
        ({"vision_config": {"patch_size": [8]}}, r"patch_size is \[8\]"),
        ({"vision_config": {"patch_size": 40}}, "a tile 0 patches a side"),
        ({"vision_config": {"image_size": 40}}, "downsample_ratio is 0.5 and a tile 5 patches a side"),
        ({"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
        ({"vision_config": {"hidden_dropout_prob": 0.1}}, "vision_config.hidden_dropout_prob is 0.1"),
        ({"vision_config": {"projection_dropout": 0.1}}, "vision_config.projection_dropout is 0.1"),
    ],
    "llava": [
        ({"text_config": {"model_type": "gemma"}}, r"text_config.model_type is 'gemma'; .* qwen2 only"),
        ({"vision_config": {"model_type": "clip"}}, r"vision_config.model_type is 'clip"),
        ({"vision_feature_layer": -6}, "layers of the tower, 1 to 4 or -4 to -1"),
        ({"model_type": "qwen2_vl"}, "model_type 'qwen2_vl' is not LLaVA"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"text_config": {"mlp_bias": True}}, "mlp_bias is true"),
    ],
    "llava_next": [
        ({"vision_feature_select_strategy": "full"}, "17 embeddings a tile of 4 x 4 patches"),
        ({"image_grid_pinpoints": [[32, 40]]}, r"has \[32, 40\]; wanted multiples of .* 32"),
    ],
    "llava_onevision": [({"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio is 'anyres'; wanted anyres_max_9")],
    "qwen25_vl": [
        ({"text_config": {"num_attention_heads": 8}}, "is 8; wanted a divisor of hidden_size 108"),
        ({"vision_config": {"window_size": 31}}, "window_size is 31; wanted at least the 32 pixels"),
        ({"text_config": {"rope_parameters": SECTIONS | {"mrope_section": [4, 4, 4]}}}, "three numbers that sum to 9"),
    ],
    "qwen3_asr": [
        ({"architectures": ["Qwen3ASRForTokenClassification"]}, "that of Qwen3-ForcedAligner"),
        ({"thinker_config": {"audio_config": {}}}, "has a thinker_config: .* Qwen/Qwen3-ASR-0.6B-hf"),
        ({"text_config": {"model_type": "qwen2"}}, "text_config.model_type is 'qwen2'"),
        ({"audio_config": {"model_type": "whisper"}}, "audio_config.model_type is 'whisper'"),
        ({"audio_config": {"n_window_infer": 50}}, "n_window_infer is 50; wanted a chunk or more"),
        ({"audio_config": {"max_position_embeddings": 12}}, "wanted the 13 embeddings of a chunk"),
        ({"audio_config": {"output_dim": 46}}, "output_dim is 46; wanted text_config.hidden_size 44"),
    ],
    "qwen25_omni": [
        ({"audio_config": {"d_model": 31, "encoder_attention_heads": 1}}, "d_model is 31; wanted an even number"),
        ({"audio_config": {"max_source_positions": 34}}, "max_source_positions is 34; wanted n_window 35"),
        ({"audio_config": {"attention_dropout": 0.1}}, "attention_dropout is 0.1"),
        ({"vision_config": {"window_size": 31}}, "window_size is 31; wanted at least the 32 pixels"),
    ],
    "gemma3": [
        ({"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention is True"),
        ({"text_config": {"sliding_window": None}}, "sliding_window is None; wanted 1 or more"),
        ({"text_config": {"hidden_activation": "relu"}}, "hidden_activation is 'relu'"),
        (
            {
                "text_config": {
                    "rope_parameters": BOTH_ROPES | {FULL: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5.0}}
                }
            },
            "full_attention.rope_type is 'dynamic'",
        ),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9; wanted the square of a divisor of 4"),
        ({"mm_tokens_per_image": 6}, "mm_tokens_per_image is 6"),
    ],
    "gemma3_text": [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"rope_parameters": BOTH_ROPES | {FULL: {"rope_type": "longrope", "rope_theta": 5.0}}}, "'longrope'"),
    ],
    "gemma4": [
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input is 8: .*for each layer"),
        ({"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers is 2: .*of an earlier one"),
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block is True: .*experts beside a dense MLP"),
        ({"text_config": {"attention_k_eq_v": False}}, "attention_k_eq_v is False: .*values of their own"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention is 'all'"),
        ({"text_config": {"per_layer_config": {"1": {"head_dim": 24}, "4": {"head_dim": 20}}}}, "the same for each"),
        (
            {"text_config": {"per_layer_config": {"0": {"head_dim": 24}}}},
            "heads of the full layers|head_dim and num_key",
        ),
        (
            {"text_config": {"per_layer_config": {"1": {"hidden_size": 24}, "4": {"hidden_size": 24}}}},
            "wanted head_dim and",
        ),
    ],
    "glm45v": [
        ({"text_config": {"topk_group": 1}}, "num_experts_per_tok is 4 and topk_group 1|these groups have 2 experts"),
        ({"text_config": {"num_experts_per_tok": 3}}, "takes two experts of each group"),
        ({"text_config": {"n_group": 4}}, "n_group is 4 and topk_group 2; wanted a divisor of the 6 experts"),
        ({"text_config": {"n_group": 6}}, "two or more to a group"),
        ({"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is false"),
        ({"text_config": {"first_k_dense_replace": 5}}, "wanted fewer than num_hidden_layers 5"),
        ({"text_config": {"n_shared_experts": 0}}, "n_shared_experts is 0"),
        ({"vision_config": {"hidden_size": 30}}, "wanted a multiple of 4"),
        ({"vision_config": {"image_size": 8}}, "image_size is 8; wanted at least patch_size 16"),
        ({"text_config": {"rope_parameters": HALF | {"mrope_section": [4, 3, 3]}}}, "three numbers that sum to 5"),
    ],
}


@pytest.mark.parametrize(
    ("family", "change", "complaint"), [(family, *case) for family, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(family: str, change: dict[str, Any], complaint: str) -> None:
    refused(family, change, complaint)


DECODERS = ("qwen3_vl", "qwen35_vl", "qwen35_text", "qwen3_omni", "qwen3", "qwen3_next")


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}, "rope_type is 'longrope'"),
        ({"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4.0}, "Missing required keys .*'low_freq_factor'"),
        (
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
            "can't compute the frequencies .float division by zero",
        ),
    ],
)
def test_what_no_decoder_has_is_refused(family: str, change: dict[str, Any], complaint: str) -> None:
    arch = FAMILIES[family].config().to_dict()
    decoder = arch.get("text_config", arch)
    more = {"rope_parameters": decoder["rope_parameters"] | change}
    refused(family, {"text_config": more} if "text_config" in arch else more, complaint)


def refused(family: str, change: dict[str, Any], complaint: str) -> None:
    """The error of the tiny config with other keys, when it is read or when the model is built of it."""
    from zoo.config.schema import PackingConfig, Recipe
    from zoo.nn.decoder.config import transformer_config

    arch = FAMILIES[family].config().to_dict()
    for key, value in change.items():
        arch[key] = arch[key] | value if isinstance(value, dict) and key in arch else value
    with pytest.raises(UserError, match=complaint):
        config = get_family(FAMILIES[family].name).load("config").from_arch(arch)
        recipe = Recipe(packing=PackingConfig(budget=256))
        transformer_config(config.text, recipe, **dict.fromkeys(config.traits, True))
