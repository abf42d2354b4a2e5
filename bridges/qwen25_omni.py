"""Qwen2.5-Omni: the thinker's parameters <-> published names (Qwen/Qwen2.5-Omni-7B).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none). Written: the hub's names. The talker and token2wav are
not trained and pass through, with the file of speakers that transformers wants beside them.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import THINKER_ALONE, decoder, module_names, renamed_modules, whole_config
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen25_omni",
    rules=(
        *decoder("thinker.model", head="thinker.lm_head.weight", score="thinker.score.weight", bias=True),
        rule("vision.{rest}", "thinker.visual.{rest}"),
        rule("audio.{rest}", "thinker.audio_tower.{rest}"),
    ),
    pass_through=("talker.{rest}", "token2wav.{rest}"),
    carry_files=("spk_dict.pt",),
    name_prefixes=(THINKER_ALONE,),
    export_config=whole_config(
        "qwen2_5_omni",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",  # the other one wants a file of speakers
    ),
    module_names=module_names("qwen2_5_omni_thinker"),
    renamed_modules=renamed_modules("qwen2_5_omni_thinker"),
)
