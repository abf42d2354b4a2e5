"""Qwen3-Next: parameters <-> published names (Qwen/Qwen3-Next-80B-A3B-Instruct).

Names in memory in transformers are the published ones, except that it has no module for `mtp.*`. Published experts stand
one by one; stacks, as transformers >= 5 has them in memory, are read as well. A projection of linear attention holds the
rows of one key head after the other. Zero-centred norms stay zero-centred. A model without MTP carries `mtp.*` through.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zoo.bridge.mapping.gated_delta_net import QKVZ_BA, hybrid_decoder
from zoo.bridge.mapping.rules import PublishedFP8
from zoo.bridge.mapping.shared_rules import fp8_linears, singles, stacks
from zoo.bridge.mapping.table import Bridge
from zoo.models.qwen3_next.config import MTP_LAYERS
from zoo.types import JsonObject


def _fresh_config(config: JsonObject, names: Collection[str]) -> JsonObject:
    """The config, with the number of MTP layers where it is not the one that goes without saying."""
    return config if any(name.startswith("mtp.") for name in names) else {**config, MTP_LAYERS: 0}


BRIDGE = Bridge(
    name="qwen3_next",
    rules=hybrid_decoder(QKVZ_BA, singles, stacks),
    optional=("mtp.{rest}",),
    fresh_config=_fresh_config,
    fp8=PublishedFP8(fp8_linears("model.layers.{layer}", "mtp.layers.{layer}"), scale=torch.float32),
)
