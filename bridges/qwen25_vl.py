"""Qwen2.5-VL: parameters <-> published names (Qwen/Qwen2.5-VL-7B-Instruct).

Published names are the first ones that transformers gave these models (`model.layers.*`, `visual.*`). Those it has in
memory today (`model.language_model.*`, `model.visual.*`) are read as well.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import attention_layer, decoder_ends, dense_mlp, qkv_bias
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "model.layers.{layer}"

BRIDGE = Bridge(
    name="qwen25_vl",
    rules=(
        *decoder_ends("model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        qkv_bias(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        rule("vision.{rest}", "visual.{rest}"),
    ),
    name_prefixes=({"model.language_model.": "model.", "model.visual.": "visual."},),
    module_names=lambda config: {"model.": "model.language_model.", "visual.": "model.visual."},
)
