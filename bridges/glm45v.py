"""GLM-4.5V and GLM-4.6V: parameters <-> published names (zai-org/GLM-4.5V).

Published experts stand one by one; in memory in transformers >= 5 they are stacked (`gate_up_proj` [E, 2I, H], `down_proj`
[E, H, I]). Both are read. The bias on the choice of experts is in fp32 whatever the other weights are in.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    qkv_bias,
    routed_experts,
    singles,
    stacks,
)
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "model.language_model.layers.{layer}"

BRIDGE = Bridge(
    name="glm45v",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        qkv_bias(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        *routed_experts(f"{_ZOO}.mlp", f"{_HF}.mlp", singles, stacks),
        rule(f"{_ZOO}.mlp.router.expert_bias", f"{_HF}.mlp.gate.e_score_correction_bias"),
        *dense_mlp(f"{_ZOO}.mlp.shared_experts", f"{_HF}.mlp.shared_experts"),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
)
