"""Qwen3-Omni: the thinker's parameters <-> published names (Qwen/Qwen3-Omni-30B-A3B-Instruct).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none), experts one by one (hub) or fused (in memory
in transformers >= 5: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]). Written: the hub's names. The talker and
code2wav are not trained and are carried through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    routed_experts,
    singles,
    stacks,
)
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "thinker.model.layers.{layer}"


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


def _module_names(config: Mapping[str, Any]) -> dict[str, str]:
    """A thinker by itself has no name."""
    return {"thinker.": ""} if config.get("model_type") == "qwen3_omni_moe_thinker" else {}


BRIDGE = Bridge(
    name="qwen3_omni",
    rules=(
        *decoder_ends("thinker.model", head="thinker.lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),  # mlp_only_layers, decoder_sparse_step
        *routed_experts(f"{_ZOO}.mlp", f"{_HF}.mlp", singles, stacks),
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
    module_names=_module_names,
)
