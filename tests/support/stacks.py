"""Checkpoints of a recipe's sizes with few layers: tiny ones as they are, published widths cut to a layer of each kind.

Their widths are those that GPU kernels take, but for ODD, whose widths kernels refuse: there zoo goes another way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from support import tiny
from support.families import FAMILIES


@dataclass(frozen=True)
class Stack:
    """A size of a family of support.families, and what is cut of it."""

    family: str
    size: str
    text: Mapping[str, Any] = field(default_factory=dict)  # cuts of the decoder's config
    vision: Mapping[str, Any] = field(default_factory=dict)
    audio: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        return FAMILIES[self.family].recipe

    @property
    def kind(self) -> str:
        """transformers' class."""
        return FAMILIES[self.family].kind

    @property
    def examples(self) -> Callable[[Any], dict[str, Any]]:
        return FAMILIES[self.family].examples

    def publish(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors in memory in transformers under the published names."""
        return FAMILIES[self.family].publish(tensors)

    def write(self, folder: Path) -> Path:
        """Write a checkpoint with random weights and give back its folder."""
        family, config = FAMILIES[self.family], self.config()
        ways: dict[str, Any] = {"randomise": family.randomise, "stored": family.stored}
        return tiny.write(folder, family.name, family.kind, config.hf, root=config.root, **ways)

    def config(self) -> Any:
        """The family's config."""
        from zoo.config.compose import load_recipe
        from zoo.registry import get_family

        recipe = load_recipe(self.recipe, [f"size={self.size}", "hardware=cpu"])
        arch = copy.deepcopy(recipe.model.arch)
        root = arch.get("thinker_config", arch)
        text, decoder = dict(self.text), root.get("text_config", root)
        if sections := text.pop("mrope", None):
            decoder["rope_parameters"]["mrope_section"] = sections
        decoder |= text
        for part, cuts in (("vision_config", self.vision), ("audio_config", self.audio)):
            if cuts:
                root[part] |= cuts
        if self.text:  # a slice of a published size
            root["tie_word_embeddings"] = decoder["tie_word_embeddings"] = False
            decoder["mtp_num_hidden_layers"] = 0
        config = get_family(recipe.model.family).load("config").from_arch(arch)
        return config.for_processor(tiny.processor(recipe.model.family, config.hf))


TINY = {
    "qwen3_vl": Stack("qwen3_vl", "tiny"),
    "qwen3_vl moe": Stack("qwen3_vl experts", "tiny-moe"),
    "qwen35_vl": Stack("qwen35_vl", "tiny"),
    "qwen35_vl moe": Stack("qwen35_vl experts", "tiny-moe"),
    "llava onevision": Stack("llava_onevision", "tiny-onevision"),
    "internvl": Stack("internvl", "tiny"),
    "internvl moe": Stack("internvl experts", "tiny-moe"),
    "qwen3": Stack("qwen3 experts", "tiny-moe"),
    "qwen35_text": Stack("qwen35_text", "tiny"),
    "qwen35_text moe": Stack("qwen35_text experts", "tiny-moe"),
    **{
        name: Stack(name, "tiny")
        for name in (
            *("qwen3_omni", "qwen25_vl", "qwen3_asr", "qwen25_omni", "gemma3", "gemma3_text", "gemma4"),
            *("qwen3_next", "glm45v"),
        )
    },
}
# Widths that kernels refuse or round up, one family each: heads of 20 and 24, experts of 14, odd numbers of experts, a
# hidden size of 40 and a vocabulary that is no multiple of anything.
_ODD = {"intermediate_size": 100, "vocab_size": 389}
_HEADS_20 = {"head_dim": 20, "hidden_size": 40, "vocab_size": 389}
_TURNED_20 = _HEADS_20 | {"mrope": [4, 3, 3]}
_HEADS_24 = {"head_dim": 24, "hidden_size": 72, "vocab_size": 389, "mrope": [4, 4, 4]}
_EXPERTS_14 = {"moe_intermediate_size": 14, "num_experts": 5, "num_experts_per_tok": 3}
_WIDE_80 = _ODD | {"hidden_size": 80}  # heads of 20
_MIXED = _EXPERTS_14 | {
    "head_dim": 40,
    "shared_expert_intermediate_size": 22,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_TOWER_20 = {"hidden_size": 80, "intermediate_size": 100}  # 4 heads
_TOWER_24 = {"hidden_size": 96, "intermediate_size": 100}
_AUDIO_20 = {"d_model": 80, "encoder_ffn_dim": 100}
_CUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # of text, vision and audio
    "qwen3_vl": (_TURNED_20 | _ODD, _TOWER_20 | {"out_hidden_size": 40}, {}),
    "qwen3_vl moe": (_TURNED_20 | _EXPERTS_14, _TOWER_20 | {"out_hidden_size": 40}, {}),
    "qwen35_vl": (
        _HEADS_24
        | _ODD
        | {"head_dim": 48}  # of which half turns
        | {"linear_key_head_dim": 20, "linear_value_head_dim": 12, "linear_num_value_heads": 6},
        _TOWER_24 | {"out_hidden_size": 72},
        {},
    ),
    "qwen35_vl moe": (_TURNED_20 | _MIXED, _TOWER_20 | {"out_hidden_size": 40}, {}),
    "llava onevision": (_WIDE_80, _TOWER_20, {}),
    "internvl moe": (_HEADS_20 | _EXPERTS_14, _TOWER_20, {}),
    "qwen3_omni": (_HEADS_24 | _EXPERTS_14, _TOWER_24 | {"out_hidden_size": 72}, _AUDIO_20 | {"output_dim": 72}),
    "qwen3_asr": (_HEADS_20 | _ODD, {}, _AUDIO_20 | {"output_dim": 40}),
    "qwen25_vl": (_WIDE_80 | {"mrope": [2, 4, 4]}, _TOWER_20 | {"out_hidden_size": 80}, {}),
    "qwen25_omni": (
        _WIDE_80 | {"mrope": [2, 4, 4]},
        _TOWER_20 | {"out_hidden_size": 80},
        _AUDIO_20 | {"d_model": 88, "output_dim": 80},
    ),
    "gemma3": (_HEADS_20 | _ODD, _TOWER_20, {}),
    "gemma3_text": (_HEADS_20 | _ODD, {}, {}),
    "glm45v": (
        _HEADS_20
        | {"vocab_size": 397, "mrope": [2, 1, 2]}  # half of 20 turns
        | {"moe_intermediate_size": 14, "n_routed_experts": 5, "num_experts_per_tok": 3},
        _TOWER_20 | {"out_hidden_size": 40},
        {},
    ),
    "qwen3": (_HEADS_20 | _EXPERTS_14, {}, {}),
    "qwen3_next": ({"hidden_size": 40, "vocab_size": 389} | _MIXED, {}, {}),
}
ODD = {
    f"{name} odd": replace(TINY[name], text=text, vision=vision, audio=audio)
    for name, (text, vision, audio) in _CUTS.items()
}

SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
MIXED = SMALL | {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = SMALL | {"layer_types": ["sliding_attention", "full_attention"]}
FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
DEEPSTACK = {"depth": 2, "deepstack_visual_indexes": [0, 1]}
WINDOWS = {"depth": 2, "fullatt_block_indexes": [1]}
LAYERS = {"num_hidden_layers": 2}
WIDE = {
    "qwen3_vl 2b": Stack("qwen3_vl", "2b", SMALL, DEEPSTACK),
    "qwen35_vl 2b": Stack("qwen35_vl", "2b", MIXED, {"depth": 2}),
    "qwen3_omni 30b-a3b": Stack("qwen3_omni", "30b-a3b", SMALL | FEW_EXPERTS, DEEPSTACK, {"encoder_layers": 2}),
    "qwen3_asr 0.6b": Stack("qwen3_asr", "0.6b", SMALL, audio={"encoder_layers": 2}),
    "qwen3 0.6b": Stack("qwen3", "0.6b", SMALL),
    "qwen3_next 80b-a3b": Stack("qwen3_next", "80b-a3b", MIXED | FEW_EXPERTS),
    "qwen25_vl 3b": Stack("qwen25_vl", "3b", SMALL, WINDOWS),
    "qwen25_omni 3b": Stack("qwen25_omni", "3b", SMALL, WINDOWS, {"encoder_layers": 2}),
    "gemma3 4b": Stack("gemma3", "4b", SLIDING, LAYERS),
    "gemma3_text 270m": Stack("gemma3_text", "270m", SLIDING),
    "gemma4 31b": Stack("gemma4", "31b", SLIDING, LAYERS),
    "internvl 1b": Stack("internvl", "1b", SMALL, LAYERS | {"image_size": 112}),
    "glm45v 4.5-106b-a12b": Stack(
        "glm45v",
        "4.5-106b-a12b",
        SMALL | {"n_routed_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None},
        {"depth": 2},
    ),
    "llava onevision-0.5b": Stack(
        "llava_onevision", "onevision-0.5b", SMALL | {"layer_types": ["full_attention"] * 2}, LAYERS
    ),
}
STACKS = TINY | ODD | WIDE
