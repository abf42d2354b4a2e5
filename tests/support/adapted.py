"""Models with adapters for tests of parity: zoo's, and transformers' with the same ones through peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.adapters import adapt, peft_gradients
from support.engine import Zoo, recipe_for
from support.families import FAMILIES, Family
from support.rows import Example
from support.tiny import load_plain
from support.tiny_omni import write_tiny_omni

ALL = ("all-linear",)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Case:
    """A model, and what is adapted."""

    family: Family
    parts: str
    targets: tuple[str, ...] = ALL
    whole: str = ""  # parts that are trained whole
    overrides: tuple[str, ...] = ()


def _case(family: Family) -> Case:
    return Case(family, family.parts, ALL + EXPERTS if family.experts else ALL)


CASES = {
    name: _case(family) for name, family in FAMILIES.items() if name not in ("internvl", "internvl qwen2", "qwen3")
}
CASES["qwen35_vl"] = _case(FAMILIES["qwen35_vl"].sized(mtp=1))
CASES["qwen35_text experts"] = _case(FAMILIES["qwen35_text experts"].sized(mtp=1))
CASES["qwen3_next"] = _case(FAMILIES["qwen3_next"].sized(mtp=1))
CASES["whole omni"] = _case(replace(FAMILIES["qwen3_omni"], write=lambda folder: write_tiny_omni(folder).whole))


def _whole(case: Case) -> Case:
    """Adapters of the language model, and all other parts trained whole."""
    from zoo.registry import get_family

    others = [part for part in get_family(case.family.name).parts if part != "language"]
    return replace(case, parts="language", whole=",".join(others))


WHOLE = {f"{name}, parts whole": _whole(case) for name, case in CASES.items() if "," in case.parts}
WHOLE["the merger, adapters in its tower"] = replace(CASES["qwen3_vl"], whole="merger")
WHOLE["the tower, adapters in its merger"] = replace(CASES["qwen25_vl"], parts="merger,language", whole="vision")
WHOLE["rank-stabilised, experts"] = replace(CASES["qwen3_vl experts"], overrides=("lora.rslora=true",))
WHOLE["DoRA"] = replace(CASES["qwen3_vl"], overrides=("lora.dora=true",))
WHOLE["DoRA, linear attention"] = replace(CASES["qwen35_vl"], overrides=("lora.dora=true",))
WHOLE["DoRA, rank-stabilised, by pattern, merger whole"] = replace(
    CASES["qwen3_vl"], parts="language", whole="merger",
    overrides=("lora.dora=true", "lora.rslora=true", "lora.rank_pattern={k_proj: 5, up_proj: 2, 'layers.1.*o_proj': 1}"),
)  # fmt: skip
WHOLE["by pattern, experts"] = replace(
    CASES["qwen35_vl experts"],
    overrides=("lora.rank_pattern={q_proj: 2, v_proj: 4, experts.gate_up_proj: 5, shared_expert.up_proj: 2}", "lora.alpha_pattern={v_proj: 3, experts.down_proj: 11, out_proj: 1.5}"),
)  # fmt: skip


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
        return total, {self.adapters.renames.former(name): g for name, g in peft_gradients(self.peft).items()}

    def found(self, batches: list[Any], **packing: Any) -> tuple[float, dict[str, Tensor]]:
        """zoo's (loss, gradients by peft's names)."""
        from zoo.bridge.mapping.peft import magnitude_names, magnitudes, tensor_names, to_peft

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
            if self.adapters.dora:
                m = magnitudes(one.target, of_model[names[id(one.adapter.m)]], self.adapters.dims)
                gradients.update(zip(magnitude_names(one.target.named), m, strict=True))
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
        *case.overrides,
        *overrides,
        recipe=case.family.recipe,
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
    return Adapted(zoo, adapters, folder, exported, wrapped, plain, case.family.examples(zoo.assembly.processor))
