"""Gemma 3 of text alone: parameters <-> published names (google/gemma-3-1b-it), which are those in memory in transformers."""

from zoo.bridge.mapping.shared_rules import decoder
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(name="gemma3_text", rules=decoder("model", sandwich=True))
