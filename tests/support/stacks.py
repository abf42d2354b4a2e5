"""Checkpoints of a recipe's sizes with few layers: tiny ones as they are, published widths cut to a layer of each kind.

Their widths are those that GPU kernels take, but for ODD, whose widths kernels refuse: there zoo goes another way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import (
    tiny,
    tiny_gemma3,
    tiny_gemma4,
    tiny_glm45v,
    tiny_internvl,
    tiny_llava,
    tiny_qwen3_vl,
    tiny_qwen25_omni,
    tiny_qwen25_vl,
    tiny_qwen35,
)
from support.rows import make_examples
from support.sound_rows import sound_examples
from support.text_rows import text_examples
from support.tile_rows import tile_examples
from support.vision_rows import vision_examples

Tensors = Mapping[str, Tensor]


def _same(tensors: Tensors) -> dict[str, Tensor]:
    return dict(tensors)


def _thinker(tensors: Tensors) -> dict[str, Tensor]:
    """Qwen3-Omni's, in memory in transformers, under the published names of the whole model."""
    return {f"thinker.{name}": tensor for name, tensor in tiny.experts_apart(tensors).items()}


@dataclass(frozen=True)
class Stack:
    """A model of a recipe: its size, what is cut of it, and how its rows and names go."""

    recipe: str
    size: str
    kind: str  # class of transformers
    examples: Callable[[Any], dict[str, Any]] = vision_examples
    randomise: Callable[[str, Tensor], None] = tiny.randomise
    stored: Callable[[Tensors], dict[str, Tensor]] = _same  # transformers' saved tensors -> the hub's layout
    publish: Callable[[Tensors], dict[str, Tensor]] = _same  # tensors in memory in transformers -> published names
    text: Mapping[str, Any] = field(default_factory=dict)  # cuts of the decoder's config
    vision: Mapping[str, Any] = field(default_factory=dict)
    audio: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write a checkpoint with random weights and give back its folder."""
        kind, config, build = self.parts()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tiny.random_model(kind, config.root, self.randomise).save_pretrained(folder)
        tiny.rewrite(folder, lambda tensors: self.stored(tensors))
        build(config.hf, None).save(folder)
        return folder

    def parts(self) -> tuple[Any, Any, Any]:
        """transformers' class, the family's config, and what builds its processor."""
        import transformers

        from zoo.config.compose import load_recipe
        from zoo.registry import get_family

        found = load_recipe(self.recipe, [f"size={self.size}", "hardware=cpu"])
        family, arch = get_family(found.model.family), copy.deepcopy(found.model.arch)
        root = arch.get("thinker_config", arch)
        text, decoder = dict(self.text), root.get("text_config", root)
        if sections := text.pop("mrope", None):
            decoder["rope_parameters"]["mrope_section"] = sections
        decoder |= text
        if self.vision:
            root["vision_config"] |= self.vision
        if self.audio:
            root["audio_config"] |= self.audio
        if self.text:  # a slice of a published size
            root["tie_word_embeddings"] = decoder["tie_word_embeddings"] = False
            decoder["mtp_num_hidden_layers"] = 0
        config, build = family.load("config").from_arch(arch), family.load("processor")
        return getattr(transformers, self.kind), config.for_processor(build(config.hf, None)), build


QWEN3_VL: dict[str, Any] = {"kind": "Qwen3VLForConditionalGeneration"}
QWEN3_VL_MOE: dict[str, Any] = {
    "kind": "Qwen3VLMoeForConditionalGeneration",
    "stored": tiny_qwen3_vl.turn_experts,
    "publish": tiny_qwen3_vl.turn_experts,
}
QWEN25_VL: dict[str, Any] = {"kind": "Qwen2_5_VLForConditionalGeneration", "publish": tiny_qwen25_vl.publish}
GLM45V: dict[str, Any] = {"kind": "Glm4vMoeForConditionalGeneration", "publish": tiny_glm45v.publish}
QWEN35: dict[str, Any] = {
    "kind": "Qwen3_5ForConditionalGeneration",
    "randomise": tiny_qwen35.randomise,
    "stored": tiny_qwen35.published,
}
LLAVA: dict[str, Any] = {
    "examples": tile_examples,
    "randomise": tiny_llava.randomise,
    "stored": tiny_llava.publish,
    "publish": tiny_llava.publish,
}
QWEN3_ASR: dict[str, Any] = {"kind": "Qwen3ASRForConditionalGeneration", "examples": sound_examples}
GEMMA3: dict[str, Any] = {
    "kind": "Gemma3ForConditionalGeneration",
    "examples": tile_examples,
    "randomise": tiny_gemma3.randomise,
    "stored": tiny_gemma3.publish,
    "publish": tiny_gemma3.publish,
}
GEMMA3_TEXT: dict[str, Any] = {
    "kind": "Gemma3ForCausalLM",
    "examples": text_examples,
    "randomise": tiny_gemma3.randomise,
}
GEMMA4: dict[str, Any] = {
    "kind": "Gemma4ForConditionalGeneration",
    "examples": tile_examples,
    "randomise": tiny_gemma4.randomise,
}
INTERNVL: dict[str, Any] = {
    "kind": "InternVLForConditionalGeneration",
    "examples": tile_examples,
    "randomise": tiny_internvl.randomise,
    "publish": tiny_internvl.publish,
}
OMNI: dict[str, Any] = {
    "kind": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "examples": make_examples,
    "publish": _thinker,
}

QWEN3: dict[str, Any] = {"examples": text_examples, "kind": "Qwen3MoeForCausalLM", "publish": tiny.experts_apart}
QWEN3_NEXT: dict[str, Any] = QWEN3 | {"kind": "Qwen3NextForCausalLM", "randomise": tiny_qwen35.randomise}
QWEN25_OMNI: dict[str, Any] = {
    "kind": "Qwen2_5OmniThinkerForConditionalGeneration",
    "examples": make_examples,
    "publish": tiny_qwen25_omni.published,
}

TINY = {
    "qwen3_vl": Stack("qwen3_vl_sft", "tiny", **QWEN3_VL),
    "qwen3_vl moe": Stack("qwen3_vl_moe_sft", "tiny-moe", **QWEN3_VL_MOE),
    "qwen35_vl": Stack("qwen35_vl_sft", "tiny", **QWEN35),
    "qwen35_vl moe": Stack("qwen35_vl_moe_sft", "tiny-moe", **QWEN35 | {"kind": "Qwen3_5MoeForConditionalGeneration"}),
    "llava onevision": Stack(
        "llava_onevision_sft", "tiny-onevision", kind="LlavaOnevisionForConditionalGeneration", **LLAVA
    ),
    "internvl": Stack("internvl_sft", "tiny", **INTERNVL),
    "internvl moe": Stack("internvl_sft", "tiny-moe", **INTERNVL),
    "qwen3_omni": Stack("qwen3_omni_sft", "tiny", **OMNI),
    "qwen25_vl": Stack("qwen25_vl_sft", "tiny", **QWEN25_VL),
    "qwen3_asr": Stack("qwen3_asr_sft", "tiny", **QWEN3_ASR),
    "qwen25_omni": Stack("qwen25_omni_sft", "tiny", **QWEN25_OMNI),
    "gemma3": Stack("gemma3_sft", "tiny", **GEMMA3),
    "gemma3_text": Stack("gemma3_text_sft", "tiny", **GEMMA3_TEXT),
    "gemma4": Stack("gemma4_sft", "tiny", **GEMMA4),
    "qwen3": Stack("qwen3_moe_sft", "tiny-moe", **QWEN3),
    "qwen3_next": Stack("qwen3_next_sft", "tiny", **QWEN3_NEXT),
    "glm45v": Stack("glm45v_sft", "tiny", **GLM45V),
}
# Widths that kernels refuse or round up, one family each: heads of 20 and 24, experts of 14, odd numbers of experts, a
# hidden size of 40 and a vocabulary that is no multiple of anything.
_HEADS_20 = {"head_dim": 20, "hidden_size": 40, "vocab_size": 389, "mrope": [4, 3, 3]}
_HEADS_24 = {"head_dim": 24, "hidden_size": 72, "vocab_size": 389, "mrope": [4, 4, 4]}
_EXPERTS_14 = {"moe_intermediate_size": 14, "num_experts": 5, "num_experts_per_tok": 3}
_TOWER_20 = {"hidden_size": 80, "intermediate_size": 100}  # 4 heads
ODD = {
    "qwen3_vl odd": replace(
        TINY["qwen3_vl"], text={**_HEADS_20, "intermediate_size": 100}, vision={**_TOWER_20, "out_hidden_size": 40}
    ),
    "qwen3_vl moe odd": replace(
        TINY["qwen3_vl moe"], text={**_HEADS_20, **_EXPERTS_14}, vision={**_TOWER_20, "out_hidden_size": 40}
    ),
    "qwen35_vl odd": replace(
        TINY["qwen35_vl"],
        text={
            **_HEADS_24,
            "head_dim": 48,  # of which half turns
            "intermediate_size": 100,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "linear_num_value_heads": 6,
        },
        vision={"hidden_size": 96, "intermediate_size": 100, "out_hidden_size": 72},
    ),
    "qwen35_vl moe odd": replace(
        TINY["qwen35_vl moe"],
        text={
            **_HEADS_20,
            "head_dim": 40,
            **_EXPERTS_14,
            "shared_expert_intermediate_size": 22,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
        },
        vision={**_TOWER_20, "out_hidden_size": 40},
    ),
    "llava onevision odd": replace(
        TINY["llava onevision"],
        text={"hidden_size": 80, "intermediate_size": 100, "vocab_size": 389},  # heads of 20
        vision={"hidden_size": 80, "intermediate_size": 100},
    ),
    "internvl moe odd": replace(
        TINY["internvl moe"],
        text={**{k: v for k, v in _HEADS_20.items() if k != "mrope"}, **_EXPERTS_14},
        vision=_TOWER_20,
    ),
    "qwen3_omni odd": replace(
        TINY["qwen3_omni"],
        text={**_HEADS_24, **_EXPERTS_14},
        vision={"hidden_size": 96, "intermediate_size": 100, "out_hidden_size": 72},
        audio={"d_model": 80, "encoder_ffn_dim": 100, "output_dim": 72},
    ),
    "qwen3_asr odd": replace(
        TINY["qwen3_asr"],
        text={"head_dim": 20, "hidden_size": 40, "intermediate_size": 100, "vocab_size": 389},
        audio={"d_model": 80, "encoder_ffn_dim": 100, "output_dim": 40},
    ),
    "qwen25_vl odd": replace(
        TINY["qwen25_vl"],
        text={"hidden_size": 80, "intermediate_size": 100, "vocab_size": 389, "mrope": [2, 4, 4]},
        vision={**_TOWER_20, "out_hidden_size": 80},
    ),
    "qwen25_omni odd": replace(
        TINY["qwen25_omni"],
        text={"hidden_size": 80, "intermediate_size": 100, "vocab_size": 389, "mrope": [2, 4, 4]},
        vision={**_TOWER_20, "out_hidden_size": 80},
        audio={"d_model": 88, "encoder_ffn_dim": 100, "output_dim": 80},
    ),
    "gemma3 odd": replace(
        TINY["gemma3"],
        text={"head_dim": 20, "hidden_size": 40, "intermediate_size": 100, "vocab_size": 389},
        vision={"hidden_size": 80, "intermediate_size": 100},
    ),
    "gemma3_text odd": replace(
        TINY["gemma3_text"], text={"head_dim": 20, "hidden_size": 40, "intermediate_size": 100, "vocab_size": 389}
    ),
    "glm45v odd": replace(
        TINY["glm45v"],
        text={
            **_HEADS_20,
            "vocab_size": 397,
            "mrope": [2, 1, 2],  # half of 20 turns
            "moe_intermediate_size": 14,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
        },
        vision={**_TOWER_20, "out_hidden_size": 40},
    ),
}

ODD |= {
    "qwen3 odd": replace(TINY["qwen3"], text={**_HEADS_20, **_EXPERTS_14} | {"mrope": None}),
    "qwen3_next odd": replace(
        TINY["qwen3_next"],
        text={
            "hidden_size": 40,
            "vocab_size": 389,
            "head_dim": 40,
            **_EXPERTS_14,
            "shared_expert_intermediate_size": 22,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
        },
    ),
}

SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
WIDE = {
    "qwen3_vl 2b": Stack(
        "qwen3_vl_sft", "2b", text=SMALL, vision={"depth": 2, "deepstack_visual_indexes": [0, 1]}, **QWEN3_VL
    ),
    "qwen35_vl 2b": Stack(
        "qwen35_vl_sft",
        "2b",
        text=SMALL | {"layer_types": ["linear_attention", "full_attention"]},
        vision={"depth": 2},
        **QWEN35,
    ),
    "qwen3_omni 30b-a3b": Stack(
        "qwen3_omni_sft",
        "30b-a3b",
        text=SMALL | {"num_experts": 8, "num_experts_per_tok": 2},
        vision={"depth": 2, "deepstack_visual_indexes": [0, 1]},
        audio={"encoder_layers": 2},
        **OMNI,
    ),
    "qwen3_asr 0.6b": Stack("qwen3_asr_sft", "0.6b", text=SMALL, audio={"encoder_layers": 2}, **QWEN3_ASR),
    "qwen3 0.6b": Stack("qwen3_sft", "0.6b", text=SMALL, **QWEN3 | {"kind": "Qwen3ForCausalLM"}),
    "qwen3_next 80b-a3b": Stack(
        "qwen3_next_sft",
        "80b-a3b",
        text=SMALL
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 8, "num_experts_per_tok": 2},
        **QWEN3_NEXT,
    ),
    "qwen25_vl 3b": Stack(
        "qwen25_vl_sft", "3b", text=SMALL, vision={"depth": 2, "fullatt_block_indexes": [1]}, **QWEN25_VL
    ),
    "qwen25_omni 3b": Stack(
        "qwen25_omni_sft",
        "3b",
        text=SMALL,
        vision={"depth": 2, "fullatt_block_indexes": [1]},
        audio={"encoder_layers": 2},
        **QWEN25_OMNI,
    ),
    "gemma3 4b": Stack(
        "gemma3_sft",
        "4b",
        text=SMALL | {"layer_types": ["sliding_attention", "full_attention"]},
        vision={"num_hidden_layers": 2},
        **GEMMA3,
    ),
    "gemma3_text 270m": Stack(
        "gemma3_text_sft", "270m", text=SMALL | {"layer_types": ["sliding_attention", "full_attention"]}, **GEMMA3_TEXT
    ),
    "gemma4 31b": Stack(
        "gemma4_sft",
        "31b",
        text=SMALL | {"layer_types": ["sliding_attention", "full_attention"]},
        vision={"num_hidden_layers": 2},
        **GEMMA4,
    ),
    "internvl 1b": Stack(
        "internvl_sft", "1b", text=SMALL, vision={"num_hidden_layers": 2, "image_size": 112}, **INTERNVL
    ),
    "glm45v 4.5-106b-a12b": Stack(
        "glm45v_sft",
        "4.5-106b-a12b",
        text=SMALL | {"n_routed_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None},
        vision={"depth": 2},
        **GLM45V,
    ),
    "llava onevision-0.5b": Stack(
        "llava_onevision_sft",
        "onevision-0.5b",
        text=SMALL | {"layer_types": ["full_attention"] * 2},
        vision={"num_hidden_layers": 2},
        kind="LlavaOnevisionForConditionalGeneration",
        **LLAVA,
    ),
}
STACKS = TINY | ODD | WIDE
