"""The table of families: how tiny checkpoints of each kind of model are written, published and given rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support import (
    tiny,
    tiny_gemma3,
    tiny_gemma4,
    tiny_glm45v,
    tiny_internvl,
    tiny_llava,
    tiny_omni,
    tiny_qwen3,
    tiny_qwen3_asr,
    tiny_qwen3_next,
    tiny_qwen3_vl,
    tiny_qwen25_omni,
    tiny_qwen25_vl,
    tiny_qwen35,
)
from support.engine import Zoo
from support.pairs import Pair
from support.rows import Example, make_examples, sound_examples, text_examples, tile_examples, vision_examples

Tensors = Mapping[str, Tensor]
SEEN, HEARD, TILED = "vision,language", "vision,audio,language", "vision,projector,language"


@dataclass(frozen=True)
class Family:
    """A kind of model that a family of zoo reads.

    zoo and transformers sum in different orders in fp32: `logits` bounds the absolute difference of logits of order one,
    `gradients` that of each gradient relative to its Euclidean norm.
    """

    name: str  # as model.family has it
    recipe: str
    kind: str  # transformers' class
    config: Callable[..., Any]  # transformers' tiny config; arguments replace keys
    write: Callable[..., Path]  # (folder, seed=0, **arguments of `config`)
    examples: Callable[[Any], dict[str, Example]] = vision_examples  # processor -> rows by name
    publish: Callable[[Tensors], dict[str, Tensor]] = dict  # tensors in memory in transformers -> published
    stored: Callable[[Tensors], dict[str, Tensor]] = dict  # those that transformers saves -> published
    randomise: Callable[[str, Tensor], None] = tiny.randomise
    parts: str = SEEN  # that have linears
    experts: bool = False
    overrides: tuple[str, ...] = ()
    logits: float = 1e-5
    gradients: float = 1e-5

    @property
    def keys(self) -> tuple[str, ...]:
        """Overrides that read a checkpoint."""
        return (f"model.family={self.name}", *self.overrides)

    def zoo(self, folder: Path, world: Any, *overrides: str) -> Zoo:
        """zoo's model of a checkpoint."""
        return Zoo.load(folder, world, *self.keys, *overrides)

    def pair(self, folder: Path, world: Any, *overrides: str, **config: Any) -> Pair:
        """A new checkpoint of `config`, in transformers and in zoo."""
        limits = {"logits_limit": self.logits, "gradients_limit": self.gradients}
        return Pair.load(
            self.write(folder, **config),
            world,
            *self.keys,
            *overrides,
            **limits,
            publish=self.publish,
            rows=self.examples,
        )

    def sized(self, **config: Any) -> Family:
        """The family with other sizes."""
        return replace(self, config=partial(self.config, **config), write=partial(self.write, **config))


_QWEN3_VL = Family(
    "qwen3_vl",
    "qwen3_vl_sft",
    "Qwen3VLForConditionalGeneration",
    tiny_qwen3_vl.tiny_config,
    tiny_qwen3_vl.write_tiny_qwen3_vl,
    publish=tiny_qwen3_vl.turn_experts,
    stored=tiny_qwen3_vl.turn_experts,
)
_QWEN35 = Family(
    "qwen35_vl",
    "qwen35_vl_sft",
    "Qwen3_5ForConditionalGeneration",
    tiny_qwen35.tiny_config,
    tiny_qwen35.write_tiny_qwen35,
    stored=tiny_qwen35.published,
    randomise=tiny_qwen35.randomise,
    overrides=("train.mtp_loss=0",),
    logits=3e-5,
    gradients=1.5e-5,
)
_LLAVA = Family(
    "llava",
    "llava_sft",
    "LlavaForConditionalGeneration",
    tiny_llava.tiny_config,
    tiny_llava.write_tiny_llava,
    tile_examples,
    publish=tiny_llava.publish,
    stored=tiny_llava.publish,
    parts=TILED,
)
_INTERNVL = Family(
    "internvl",
    "internvl_sft",
    "InternVLForConditionalGeneration",
    tiny_internvl.tiny_config,
    tiny_internvl.write_tiny_internvl,
    tile_examples,
    publish=tiny_internvl.publish,
    parts=TILED,
    overrides=("packing.budget=2048",),
)
_QWEN3 = Family(
    "qwen3",
    "qwen3_sft",
    "Qwen3ForCausalLM",
    tiny_qwen3.tiny_config,
    tiny_qwen3.write_tiny_qwen3,
    text_examples,
    publish=tiny.experts_apart,
    parts="language",
)
_QWEN35_TEXT = replace(
    _QWEN3,
    name="qwen35_text",
    recipe="qwen35_text_sft",
    kind="Qwen3_5ForCausalLM",
    config=tiny_qwen35.tiny_text_config,
    write=tiny_qwen35.write_tiny_qwen35_text,
    randomise=tiny_qwen35.randomise,
    overrides=("train.mtp_loss=0",),
    logits=3e-5,
    gradients=1.5e-5,
)
_GEMMA3 = Family(
    "gemma3",
    "gemma3_sft",
    "Gemma3ForConditionalGeneration",
    tiny_gemma3.tiny_config,
    tiny_gemma3.write_tiny_gemma3,
    tile_examples,
    publish=tiny_gemma3.publish,
    stored=tiny_gemma3.publish,
    randomise=tiny_gemma3.randomise,
    parts=TILED,
    logits=2e-5,
    gradients=2e-5,
)
FAMILIES = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl experts": replace(
        _QWEN3_VL.sized(moe=True), kind="Qwen3VLMoeForConditionalGeneration", experts=True, recipe="qwen3_vl_moe_sft"
    ),
    "qwen35_vl": _QWEN35,
    "qwen35_vl experts": replace(
        _QWEN35.sized(moe=True), kind="Qwen3_5MoeForConditionalGeneration", experts=True, recipe="qwen35_vl_moe_sft"
    ),
    "qwen3_omni": Family(
        "qwen3_omni",
        "qwen3_omni_sft",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        tiny_omni.thinker_config,
        tiny_omni.write_tiny_thinker,
        make_examples,
        publish=tiny_omni.published,
        parts=HEARD,
        experts=True,
        gradients=2e-5,  # a bias of queries, whose gradient is one of small differences
    ),
    "llava": _LLAVA,
    "llava_next": replace(_LLAVA.sized(kind="llava_next"), kind="LlavaNextForConditionalGeneration"),
    "llava_onevision": replace(
        _LLAVA.sized(kind="llava_onevision"),
        kind="LlavaOnevisionForConditionalGeneration",
        recipe="llava_onevision_sft",
    ),
    "internvl": _INTERNVL,
    "internvl experts": replace(_INTERNVL.sized(kind="qwen3_moe"), experts=True),
    "internvl qwen2": _INTERNVL.sized(kind="qwen2"),
    "qwen25_vl": Family(
        "qwen25_vl",
        "qwen25_vl_sft",
        "Qwen2_5_VLForConditionalGeneration",
        tiny_qwen25_vl.tiny_config,
        tiny_qwen25_vl.write_tiny_qwen25_vl,
        publish=tiny_qwen25_vl.publish,
    ),
    "qwen3_asr": Family(
        "qwen3_asr",
        "qwen3_asr_sft",
        "Qwen3ASRForConditionalGeneration",
        tiny_qwen3_asr.tiny_config,
        tiny_qwen3_asr.write_tiny_qwen3_asr,
        sound_examples,
        parts="audio,projector,language",
    ),
    "qwen25_omni": Family(
        "qwen25_omni",
        "qwen25_omni_sft",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        tiny_qwen25_omni.thinker_config,
        tiny_qwen25_omni.write_tiny_qwen25_omni,
        make_examples,
        publish=tiny_qwen25_omni.published,
        parts=HEARD,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": replace(
        _GEMMA3,
        name="gemma3_text",
        recipe="gemma3_text_sft",
        kind="Gemma3ForCausalLM",
        config=tiny_gemma3.tiny_text_config,
        write=tiny_gemma3.write_tiny_gemma3_text,
        examples=text_examples,
        publish=dict,
        stored=dict,
        parts="language",
    ),
    "gemma4": replace(
        _GEMMA3,
        name="gemma4",
        recipe="gemma4_sft",
        kind="Gemma4ForConditionalGeneration",
        config=tiny_gemma4.tiny_config,
        write=tiny_gemma4.write_tiny_gemma4,
        publish=dict,
        stored=dict,
        randomise=tiny_gemma4.randomise,
    ),
    "qwen3": _QWEN3,
    "qwen3 experts": replace(_QWEN3.sized(moe=True), kind="Qwen3MoeForCausalLM", experts=True, recipe="qwen3_moe_sft"),
    "qwen35_text": _QWEN35_TEXT,
    "qwen35_text experts": replace(
        _QWEN35_TEXT.sized(moe=True), kind="Qwen3_5MoeForCausalLM", experts=True, recipe="qwen35_text_moe_sft"
    ),
    "qwen3_next": replace(
        _QWEN3,
        name="qwen3_next",
        recipe="qwen3_next_sft",
        kind="Qwen3NextForCausalLM",
        config=tiny_qwen3_next.tiny_config,
        write=tiny_qwen3_next.write_tiny_qwen3_next,
        randomise=tiny_qwen35.randomise,
        experts=True,
        overrides=("train.mtp_loss=0",),
        logits=3e-5,
        gradients=1.5e-5,
    ),
    "glm45v": Family(
        "glm45v",
        "glm45v_sft",
        "Glm4vMoeForConditionalGeneration",
        tiny_glm45v.tiny_config,
        tiny_glm45v.write_tiny_glm45v,
        publish=tiny_glm45v.publish,
        experts=True,
    ),
}


def pair_of(*names: str) -> Any:
    """The fixture `pair`, of module scope: each of these families in transformers and in zoo."""

    @pytest.fixture(scope="module", params=names)
    def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
        return FAMILIES[request.param].pair(tmp_path_factory.mktemp("tiny") / "hf", cpu_world)

    return pair
