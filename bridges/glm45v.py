"""GLM-4.5V and GLM-4.6V: parameters <-> published names (zai-org/GLM-4.5V).

Published experts stand one by one; in memory in transformers >= 5 they are stacked (`gate_up_proj` [E, 2I, H], `down_proj`
[E, H, I]). Both are read. The bias on the choice of experts is in fp32 whatever the other weights are in.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder, dense_mlp, singles, stacks
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "model.language_model.layers.{layer}"

BRIDGE = Bridge(
    name="glm45v",
    rules=(
        *decoder("model.language_model", singles, stacks),
        rule(f"{_ZOO}.mlp.router.expert_bias", f"{_HF}.mlp.gate.e_score_correction_bias"),
        *dense_mlp(f"{_ZOO}.mlp.shared_experts", f"{_HF}.mlp.shared_experts"),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
)
