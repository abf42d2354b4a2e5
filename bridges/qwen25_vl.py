"""Qwen2.5-VL: parameters <-> published names (Qwen/Qwen2.5-VL-7B-Instruct).

Published names are the first ones that transformers gave these models (`model.layers.*`, `visual.*`). Those it has in
memory today (`model.language_model.*`, `model.visual.*`) are read as well.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen25_vl",
    rules=(*decoder("model"), rule("vision.{rest}", "visual.{rest}")),
    name_prefixes=({"model.language_model.": "model.", "model.visual.": "visual."},),
    module_names=lambda config: {"model.": "model.language_model.", "visual.": "model.visual."},
)
