"""Qwen3-Omni: thinker's and talker's parameters <-> published names (Qwen/Qwen3-Omni-30B-A3B-Instruct).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none), experts one by one (hub) or fused (in memory
in transformers >= 5: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]). Written: the hub's names. A talker that is not
trained passes through, as code2wav always does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zoo.bridge.mapping.rules import Rule, rule
from zoo.bridge.mapping.shared_rules import (
    THINKER_ALONE,
    attention_layer,
    decoder,
    dense_mlp,
    module_names,
    renamed_modules,
    routed_experts,
    singles,
    stacks,
    vocabulary,
    whole_config,
)
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.mapping.transforms import QKV, OfPart

_LAYER, _CODES = "talker.decoder.layers.{layer}", "talker.code_predictor.decoder.layers.{layer}"
_HF_LAYER, _HF_CODES = "talker.model.layers.{layer}", "talker.code_predictor.model.layers.{layer}"
_SHARED = f"{_HF_LAYER}.mlp.shared_expert"


def _talker() -> tuple[Rule, ...]:
    """Its decoder and projections, and the code predictor, whose parameters of each codebook stand by themselves."""
    codes = partial(vocabulary, part="talker")
    experts = routed_experts(f"{_LAYER}.mlp", f"{_HF_LAYER}.mlp", singles, stacks)
    return (
        rule("talker.embedding.word_embeddings.weight", "talker.model.codec_embedding.weight", shard=codes),
        rule("talker.decoder.final_layernorm.weight", "talker.model.norm.weight"),
        rule("talker.output_layer.weight", "talker.codec_head.weight", shard=codes),
        rule("talker.text_projection.{rest}", "talker.text_projection.{rest}"),
        rule("talker.hidden_projection.{rest}", "talker.hidden_projection.{rest}"),
        *attention_layer(_LAYER, _HF_LAYER, OfPart("talker", QKV())),
        *(replace(mapped, part="talker") for mapped in experts),
        *dense_mlp(f"{_LAYER}.mlp.shared_experts", _SHARED),
        rule(f"{_LAYER}.mlp.shared_experts.gate_weight", f"{_SHARED}_gate.weight"),
        *attention_layer(_CODES, _HF_CODES, OfPart("code_predictor", QKV())),
        *dense_mlp(f"{_CODES}.mlp", f"{_HF_CODES}.mlp"),
        rule("talker.code_predictor.decoder.final_layernorm.weight", "talker.code_predictor.model.norm.weight"),
        rule("talker.code_predictor.embeddings.{rest}", "talker.code_predictor.model.codec_embedding.{rest}"),
        rule("talker.code_predictor.heads.{rest}", "talker.code_predictor.lm_head.{rest}"),
    )


BRIDGE = Bridge(
    name="qwen3_omni",
    rules=(
        *decoder("thinker.model", singles, stacks, head="thinker.lm_head.weight", score="thinker.score.weight"),
        rule("vision.{rest}", "thinker.visual.{rest}"),
        rule("audio.{rest}", "thinker.audio_tower.{rest}"),
        *_talker(),
    ),
    pass_through=("code2wav.{rest}",),
    optional=("talker.{rest}",),
    optional_key="train.speech_loss",
    name_prefixes=(THINKER_ALONE,),
    export_config=whole_config("qwen3_omni_moe", *["Qwen3OmniMoeForConditionalGeneration"] * 2),
    module_names=module_names("qwen3_omni_moe_thinker"),
    renamed_modules=renamed_modules("qwen3_omni_moe_thinker"),
    stacked_adapters=True,
)
