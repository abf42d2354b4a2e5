"""InternVL: parameters <-> published names (OpenGVLab/InternVL3_5-8B-HF and its kin).

Published names are the first ones that transformers gave these models, and those it saves by. Those it has in memory today
are read as well. Published experts stand one by one; stacks of them, as in memory, are read.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder, published_experts, singles, stacks, swapped
from zoo.bridge.mapping.table import Bridge

_MODULES = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

BRIDGE = Bridge(
    name="internvl",
    rules=(
        *decoder("language_model.model", singles, stacks, head="language_model.lm_head.weight"),
        rule("vision.{rest}", "vision_tower.{rest}"),
        rule("projector.{rest}", "multi_modal_projector.{rest}"),
    ),
    name_prefixes=({**swapped(_MODULES), "lm_head.": "language_model.lm_head."},),
    export_config=published_experts,
    module_names=lambda config: _MODULES,
)
