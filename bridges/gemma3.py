"""Gemma 3: parameters <-> published names (google/gemma-3-4b-it).

Published names are the first ones that transformers gave these models. Those it has in memory today are read as well.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder, swapped
from zoo.bridge.mapping.table import Bridge

_TOWER = "vision_tower.vision_model."
_MODULES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    _TOWER: "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

BRIDGE = Bridge(
    name="gemma3",
    rules=(
        *decoder("language_model.model", head="language_model.lm_head.weight", sandwich=True),
        rule("vision.{rest}", f"{_TOWER}{{rest}}"),
        rule("projector.{rest}", "multi_modal_projector.{rest}"),
    ),
    name_prefixes=(
        {"model.vision_tower.vision_model.": _TOWER, **swapped(_MODULES), _TOWER: _TOWER, "vision_tower.": _TOWER},
    ),
    module_names=lambda config: _MODULES,
)
