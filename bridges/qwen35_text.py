"""Qwen3.5 of text alone: parameters <-> published names, which are those that transformers saves; MTP's are those of the whole model.

A decoder that was taken out of the whole model may keep the names that it had there. Experts stand one by one, or in stacks as
the whole model has them; an export keeps what its source has. A model without MTP carries `mtp.*` through.
"""

from zoo.bridge.mapping.gated_delta_net import QKV_Z_B_A, hybrid_decoder, in_fp32, without_mtp
from zoo.bridge.mapping.rules import PublishedFP8
from zoo.bridge.mapping.shared_rules import LAYERS, fp8_linears, singles, stacks
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen35_text",
    rules=hybrid_decoder(QKV_Z_B_A, singles, stacks, keeps_layout=True),
    name_prefixes=({"model.language_model.": "model."},),
    fp32=in_fp32(f"{LAYERS}.self_attention"),
    optional=("mtp.{rest}",),
    fresh_config=without_mtp,
    fp8=PublishedFP8(fp8_linears("model.layers.{layer}", "mtp.layers.{layer}")),
)
