"""Models with adapters for tests of parity: zoo's, and transformers' with the same ones through peft."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.adapters import adapt, peft_gradients
from support.engine import Zoo, recipe_for
from support.rows import Example, make_examples
from support.sound_rows import sound_examples
from support.text_rows import text_examples
from support.tile_rows import tile_examples
from support.tiny import load_plain
from support.tiny_gemma3 import write_tiny_gemma3, write_tiny_gemma3_text
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_glm45v import write_tiny_glm45v
from support.tiny_internvl import write_tiny_internvl
from support.tiny_llava import write_tiny_llava
from support.tiny_omni import write_tiny_omni
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_asr import write_tiny_qwen3_asr
from support.tiny_qwen3_next import write_tiny_qwen3_next
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen25_omni import write_tiny_qwen25_omni
from support.tiny_qwen25_vl import write_tiny_qwen25_vl
from support.tiny_qwen35 import write_tiny_qwen35
from support.vision_rows import vision_examples

ALL = ("all-linear",)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Case:
    """A model, its rows, and what is adapted."""

    recipe: str
    write: Callable[[Path], Path]
    examples: Callable[[Any], dict[str, Example]]
    parts: str
    targets: tuple[str, ...] = ALL
    whole: str = ""  # parts that are trained whole


SEEN, HEARD, TILED = "vision,language", "vision,audio,language", "vision,projector,language"
CASES = {
    "qwen3_vl": Case("qwen3_vl_sft", write_tiny_qwen3_vl, vision_examples, SEEN),
    "qwen3_vl experts": Case(
        "qwen3_vl_moe_sft", lambda f: write_tiny_qwen3_vl(f, moe=True), vision_examples, SEEN, ALL + EXPERTS
    ),
    "qwen35": Case("qwen35_vl_sft", lambda f: write_tiny_qwen35(f, mtp=1), vision_examples, SEEN),
    "qwen35 experts": Case(
        "qwen35_vl_moe_sft", lambda f: write_tiny_qwen35(f, moe=True), vision_examples, SEEN, ALL + EXPERTS
    ),
    "omni thinker": Case(
        "qwen3_omni_sft", lambda f: write_tiny_omni(f, whole=False).thinker, make_examples, HEARD, ALL + EXPERTS
    ),
    "omni": Case("qwen3_omni_sft", lambda f: write_tiny_omni(f).whole, make_examples, HEARD, ALL + EXPERTS),
    **{
        kind: Case("llava_sft", lambda f, kind=kind: write_tiny_llava(f, kind), tile_examples, TILED)
        for kind in ("llava", "llava_next", "llava_onevision")
    },
    "internvl experts": Case(
        "internvl_sft", lambda f: write_tiny_internvl(f, "qwen3_moe"), tile_examples, TILED, ALL + EXPERTS
    ),
    "qwen25_vl": Case("qwen25_vl_sft", write_tiny_qwen25_vl, vision_examples, SEEN),
    "qwen3_asr": Case("qwen3_asr_sft", write_tiny_qwen3_asr, sound_examples, "audio,projector,language"),
    "qwen25_omni": Case("qwen25_omni_sft", write_tiny_qwen25_omni, make_examples, HEARD),
    "gemma3": Case("gemma3_sft", write_tiny_gemma3, tile_examples, TILED),
    "gemma3_text": Case("gemma3_text_sft", write_tiny_gemma3_text, text_examples, "language"),
    "gemma4": Case("gemma4_sft", write_tiny_gemma4, tile_examples, TILED),
    "qwen3 experts": Case(
        "qwen3_moe_sft", lambda f: write_tiny_qwen3(f, moe=True), text_examples, "language", ALL + EXPERTS
    ),
    "qwen3_next": Case(
        "qwen3_next_sft", lambda f: write_tiny_qwen3_next(f, mtp=1), text_examples, "language", ALL + EXPERTS
    ),
    "glm45v": Case("glm45v_sft", write_tiny_glm45v, vision_examples, SEEN, ALL + EXPERTS),
}


@dataclass(frozen=True)
class Adapted:
    """zoo's model with adapters, transformers' with the same ones through peft, and rows."""

    zoo: Zoo
    adapters: Any
    folder: Path  # of the checkpoint
    exported: Path  # the adapter
    peft: Any
    plain: Any  # transformers' model inside peft's
    examples: Mapping[str, Example]

    @property
    def samples(self) -> list[Any]:
        return [example.sample for example in self.examples.values()]

    @property
    def count(self) -> int:
        return sum(sample.num_labels for sample in self.samples)

    @torch.no_grad()
    def logits(self) -> list[Tensor]:
        return [self.plain(**example.features).logits[0] for example in self.examples.values()]

    def wanted(self) -> tuple[float, dict[str, Tensor]]:
        """peft's (loss, gradients by its names), rows one by one."""
        total = 0.0
        for example in self.examples.values():
            mean = self.plain(**example.features, labels=example.sample.labels[None]).loss
            loss = mean * example.sample.num_labels / self.count
            loss.backward()
            total += loss.item()
        return total, peft_gradients(self.peft)

    def found(self, batches: list[Any], **packing: Any) -> tuple[float, dict[str, Tensor]]:
        """zoo's (loss, gradients by peft's names)."""
        from zoo.bridge.mapping.peft import tensor_names, to_peft

        loss, of_model = self.zoo.gradients(batches, self.count, **packing)
        trained = set(self.adapters.whole.trained)
        assert {name for name, g in of_model.items() if g is not None} == {
            name for name in of_model if ".lora." in name or name in trained
        }
        names = {id(p): name for name, p in self.zoo.model.named_parameters()}
        gradients = {}
        for one in self.adapters.held:
            a, b = (of_model[names[id(getattr(one.adapter, name))]] for name in "ab")
            pairs = to_peft(one.target, a, b, self.adapters.dims)
            peft_names = tensor_names(one.target.named, self.adapters.stacks)
            for pair, made in zip(peft_names, pairs, strict=True):
                gradients.update(zip(pair, made, strict=True))
        for saved, parameter in self.adapters.whole.saved:
            if parameter.requires_grad:
                gradients |= saved.to_peft(of_model[saved.zoo], self.adapters.dims)
        return loss, gradients


def recipe_of(case: Case, folder: Path, *overrides: str) -> Any:
    return recipe_for(
        folder,
        "lora.rank=3",
        "lora.alpha=7",
        f"lora.targets={json.dumps(list(case.targets))}",
        f"lora.parts=[{case.parts}]",
        f"lora.whole_parts=[{case.whole}]",
        "train.mtp_loss=0",
        *overrides,
        recipe=case.recipe,
    )


def with_adapters(recipe: Any, world: Any) -> tuple[Zoo, Any]:
    """zoo's model of a recipe with random adapters, and what is trained whole changed beside them."""
    from zoo.checkpoint import initial_weights
    from zoo.model import build

    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, world)
    initial_weights.init_weights(chunks, assembly, recipe, world)
    adapters = adapt(chunks, assembly, recipe, world)
    return Zoo(recipe, assembly, chunks[0].train(), world), adapters


def load(case: Case, folder: Path, world: Any, target: Path) -> Adapted:
    """zoo's model, and peft's of its export."""
    import peft

    from zoo.checkpoint import lora_files

    zoo, adapters = with_adapters(recipe_of(case, folder), world)
    exported = lora_files.export_adapters(adapters, target, zoo.assembly, zoo.recipe, world, steps=0)
    base = load_plain(folder)
    wrapped = peft.PeftModel.from_pretrained(base, exported, is_trainable=True).eval()
    plain = getattr(wrapped.base_model.model, "thinker", wrapped.base_model.model)
    return Adapted(zoo, adapters, folder, exported, wrapped, plain, case.examples(zoo.assembly.processor))
