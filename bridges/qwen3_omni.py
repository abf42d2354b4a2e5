"""Qwen3-Omni: the thinker's parameters <-> published names (Qwen/Qwen3-Omni-30B-A3B-Instruct).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none), experts one by one (hub) or fused (in memory
in transformers >= 5: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]). Written: the hub's names. The talker and
code2wav are not trained and pass through.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    THINKER_ALONE,
    decoder,
    module_names,
    renamed_modules,
    singles,
    stacks,
    whole_config,
)
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen3_omni",
    rules=(
        *decoder("thinker.model", singles, stacks, head="thinker.lm_head.weight", score="thinker.score.weight"),
        rule("vision.{rest}", "thinker.visual.{rest}"),
        rule("audio.{rest}", "thinker.audio_tower.{rest}"),
    ),
    pass_through=("talker.{rest}", "code2wav.{rest}"),
    name_prefixes=(THINKER_ALONE,),
    export_config=whole_config("qwen3_omni_moe", *["Qwen3OmniMoeForConditionalGeneration"] * 2),
    module_names=module_names("qwen3_omni_moe_thinker"),
    renamed_modules=renamed_modules("qwen3_omni_moe_thinker"),
    stacked_adapters=True,
)
