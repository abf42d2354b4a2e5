"""Parameters <-> published names."""

from zoo.bridge.mapping.shared_rules import attention_layer, decoder_ends, dense_mlp
from zoo.bridge.mapping.table import Bridge

ZOO, HF = "decoder.layers.{layer}", "model.layers.{layer}"

BRIDGE = Bridge(
    name="toy_lm",
    rules=(*decoder_ends("model", "lm_head.weight"), *attention_layer(ZOO, HF), *dense_mlp(f"{ZOO}.mlp", f"{HF}.mlp")),
)
