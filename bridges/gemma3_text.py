"""Gemma 3 of text alone: parameters <-> published names (google/gemma-3-1b-it), which are those in memory in transformers."""

from zoo.bridge.mapping.shared_rules import attention_layer, decoder_ends, dense_mlp
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "model.layers.{layer}"

BRIDGE = Bridge(
    name="gemma3_text",
    rules=(
        *decoder_ends("model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF, sandwich=True),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
    ),
)
