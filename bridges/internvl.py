"""InternVL: parameters <-> published names (OpenGVLab/InternVL3_5-8B-HF and its kin).

Published names are the first ones that transformers gave these models, and those it saves by. Those it has in memory today
are read as well. Published experts stand one by one; stacks of them, as in memory, are read.
"""

from __future__ import annotations

from collections.abc import Collection

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    published_experts,
    qkv_bias,
    routed_experts,
    singles,
    stacks,
)
from zoo.bridge.mapping.table import Bridge
from zoo.types import JsonObject

_ZOO = "decoder.layers.{layer}"
_HF = "language_model.model.layers.{layer}"
_MODULES = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
_MEMORY = {**{module: published for published, module in _MODULES.items()}, "lm_head.": "language_model.lm_head."}


def _export_config(config: JsonObject, names: Collection[str]) -> JsonObject:
    return {**config, "text_config": published_experts(config["text_config"])}


BRIDGE = Bridge(
    name="internvl",
    rules=(
        *decoder_ends("language_model.model", head="language_model.lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        qkv_bias(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        *routed_experts(f"{_ZOO}.mlp", f"{_HF}.mlp", singles, stacks),
        rule("vision.{rest}", "vision_tower.{rest}"),
        rule("projector.{rest}", "multi_modal_projector.{rest}"),
    ),
    name_prefixes=(_MEMORY,),
    export_config=_export_config,
    module_names=lambda config: _MODULES,
)
