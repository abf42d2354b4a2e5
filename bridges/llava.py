"""LLaVA 1.5, NeXT and OneVision: parameters <-> published names (llava-hf/llava-1.5-7b-hf and its kin).

Published names are the first ones that transformers gave these models. Those it has in memory today are read as well, and
those it saves by: the published ones, but without `vision_model` where a model did not come from such a file.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder, swapped
from zoo.bridge.mapping.table import Bridge

_TOWER = "vision_tower.vision_model."
_MODULES = {
    "language_model.model.": "model.language_model.",
    _TOWER: "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
_OTHER = {
    "model.vision_tower.vision_model.": _TOWER,
    **swapped(_MODULES),
    "model.": "",  # the newline
    _TOWER: _TOWER,
    "vision_tower.": _TOWER,
    "lm_head.": "language_model.lm_head.",
}

BRIDGE = Bridge(
    name="llava",
    rules=(
        *decoder("language_model.model", head="language_model.lm_head.weight"),
        rule("vision.{rest}", f"{_TOWER}{{rest}}"),
        *(rule(f"projector.linear_{i}.{{rest}}", f"multi_modal_projector.linear_{i}.{{rest}}") for i in (1, 2)),
        rule("projector.image_newline", "image_newline"),
    ),
    name_prefixes=(_OTHER,),
    module_names=lambda config: _MODULES,
)
