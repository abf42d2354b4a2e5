"""Qwen2.5-Omni: thinker's and talker's parameters <-> published names (Qwen/Qwen2.5-Omni-7B).

Read: full checkpoints (`thinker.` prefix) and thinker-only ones (none). Written: the hub's names. A talker that is not trained
passes through, as token2wav always does, with the file of speakers that transformers wants beside them.
"""

from __future__ import annotations

from functools import partial

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    THINKER_ALONE,
    attention_layer,
    decoder,
    dense_mlp,
    module_names,
    renamed_modules,
    vocabulary,
    whole_config,
)
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.mapping.transforms import QKV, OfPart

_LAYER, _HF_LAYER, _QKV = "talker.decoder.layers.{layer}", "talker.model.layers.{layer}", OfPart("talker", QKV())
_CODES = partial(vocabulary, part="talker")

BRIDGE = Bridge(
    name="qwen25_omni",
    rules=(
        *decoder("thinker.model", head="thinker.lm_head.weight", score="thinker.score.weight"),
        rule("vision.{rest}", "thinker.visual.{rest}"),
        rule("audio.{rest}", "thinker.audio_tower.{rest}"),
        rule("talker.embedding.word_embeddings.weight", "talker.model.embed_tokens.weight", shard=_CODES),
        rule("talker.decoder.final_layernorm.weight", "talker.model.norm.weight"),
        rule("talker.output_layer.weight", "talker.codec_head.weight", shard=_CODES),
        rule("talker.thinker_to_talker_proj.{rest}", "talker.thinker_to_talker_proj.{rest}"),
        *attention_layer(_LAYER, _HF_LAYER, _QKV),
        *dense_mlp(f"{_LAYER}.mlp", f"{_HF_LAYER}.mlp"),
    ),
    pass_through=("token2wav.{rest}",),
    optional=("talker.{rest}",),
    optional_key="train.speech_loss",
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
