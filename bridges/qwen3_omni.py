"""Qwen3-Omni: the thinker's parameters <-> published names (Qwen/Qwen3-Omni-30B-A3B-Instruct).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none), experts one by one (hub) or fused (in memory
in transformers >= 5: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]). Written: the hub's names. The talker and
code2wav are not trained and are carried through.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from zoo.bridge.mapping import Bridge, Layout, Rule, per_expert_down, per_expert_gate_up, rule
from zoo.bridge.transforms import QKV, GateUp

_EMBEDDING = "thinker.model.embed_tokens.weight"
_ZOO = "decoder.layers.{layer}"
_HF = "thinker.model.layers.{layer}"
_ATTENTION = f"{_HF}.self_attn"
_EXPERTS = f"{_HF}.mlp.experts"


def _export_config(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The full model's config.json; without a talker in the weights, HF must not build one (enable_audio_output).

    A thinker's own config is wrapped, as only Qwen3OmniMoeForConditionalGeneration reads `thinker.` names
    and ours are the published ones; the special token ids outside the thinker then have HF's defaults.
    """
    if config.get("model_type") == "qwen3_omni_moe_thinker":
        config = {
            "model_type": "qwen3_omni_moe",
            "thinker_config": {k: v for k, v in config.items() if k != "architectures"},
        }
    return {
        **config,
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "enable_audio_output": any(name.startswith("talker.") for name in names),
    }


BRIDGE = Bridge(
    name="qwen3_omni",
    rules=(
        rule("embedding.word_embeddings.weight", _EMBEDDING, shard="tp0"),
        rule(f"{_ZOO}.input_layernorm.weight", f"{_HF}.input_layernorm.weight"),
        rule(
            f"{_ZOO}.self_attention.linear_qkv.weight",
            *(f"{_ATTENTION}.{part}_proj.weight" for part in "qkv"),
            transform=QKV(),
            shard="tp0",
        ),
        rule(f"{_ZOO}.self_attention.linear_proj.weight", f"{_ATTENTION}.o_proj.weight", shard="tp1"),
        rule(f"{_ZOO}.self_attention.q_layernorm.weight", f"{_ATTENTION}.q_norm.weight"),
        rule(f"{_ZOO}.self_attention.k_layernorm.weight", f"{_ATTENTION}.k_norm.weight"),
        rule(f"{_ZOO}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight"),
        # dense layers (mlp_only_layers, decoder_sparse_step)
        rule(
            f"{_ZOO}.mlp.linear_fc1.weight",
            f"{_HF}.mlp.gate_proj.weight",
            f"{_HF}.mlp.up_proj.weight",
            transform=GateUp(),
            shard="tp0-gateup",
        ),
        rule(f"{_ZOO}.mlp.linear_fc2.weight", f"{_HF}.mlp.down_proj.weight", shard="tp1"),
        # MoE layers
        rule(f"{_ZOO}.mlp.router.weight", f"{_HF}.mlp.gate.weight"),
        Rule(
            f"{_ZOO}.mlp.experts.weight1",
            (per_expert_gate_up(_EXPERTS), Layout((f"{_EXPERTS}.gate_up_proj",))),
            shard="expert1",
        ),
        Rule(
            f"{_ZOO}.mlp.experts.weight2",
            (per_expert_down(_EXPERTS), Layout((f"{_EXPERTS}.down_proj",))),
            shard="expert2",
        ),
        rule("decoder.final_layernorm.weight", "thinker.model.norm.weight"),
        Rule("output_layer.weight", (Layout(("thinker.lm_head.weight",)),), "tp0", tied_to=_EMBEDDING),
        rule("vision.{rest}", "thinker.visual.{rest}"),
        rule("audio.{rest}", "thinker.audio_tower.{rest}"),
    ),
    carry=("talker.{rest}", "code2wav.{rest}"),
    dialects=(  # Qwen3OmniMoeThinkerForConditionalGeneration.save_pretrained
        {
            "model.": "thinker.model.",
            "lm_head.": "thinker.lm_head.",
            "visual.": "thinker.visual.",
            "audio_tower.": "thinker.audio_tower.",
        },
    ),
    export_config=_export_config,
)
