"""A model and its step through zoo's own path: recipe -> assemble -> build_model -> init_weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

RECIPE = "qwen3_omni_sft"


def recipe_for(folder: Path | str, *overrides: str, recipe: str = RECIPE, ranks: int = 1) -> Any:
    """The validated recipe for a Hugging Face folder on the CPU, one thread, no aux loss unless overridden."""
    from support.recipes import load_effective
    from zoo.config.validate import validate

    fixed = ["hardware=cpu", "engine.threads=1", "train.aux_loss=0"]
    return validate(load_effective(recipe, [*fixed, f"model.init={folder}", *overrides]), ranks)


@contextmanager
def single_process_world() -> Iterator[Any]:
    """zoo's world of one rank under gloo, whatever launcher variables the environment holds."""
    from zoo.config.schema import EngineConfig, Recipe
    from zoo.parallel.world import open_world

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        with open_world(Recipe(engine=EngineConfig(threads=1))) as here:
            yield here


def load_model(recipe: Any, world: Any) -> tuple[Any, list[Any]]:
    """The assembly of a recipe, and its model's chunks with their first weights."""
    from zoo.checkpoint import initial_weights
    from zoo.model import build

    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, world, adapts=bool(recipe.lora.rank))
    initial_weights.init_weights(chunks, assembly, recipe, world)
    return assembly, chunks


@dataclass(frozen=True)
class Batch:
    """A micro-batch made by hand, as a foreign loop would bring it (zoo.steps.batch.MicroBatchLike)."""

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    lengths: tuple[int, ...] | None
    media: Mapping[str, Tensor]


def join_media(samples: Sequence[Any]) -> dict[str, Tensor]:
    """Media of all samples, joined in order."""
    names = dict.fromkeys(name for sample in samples for name in sample.media)
    return {name: torch.cat([s.media[name] for s in samples if name in s.media]) for name in names}


def packed_batch(samples: Sequence[Any]) -> Batch:
    """Samples end to end, without padding."""
    ids, labels = (torch.cat([getattr(s, name) for s in samples])[None] for name in ("input_ids", "labels"))
    return Batch(ids, labels, None, tuple(s.length for s in samples), join_media(samples))


def padded_batch(samples: Sequence[Any], side: str = "right", extra: int = 0, fill: int = 0) -> Batch:
    """Samples side by side, padded on one `side` ("mixed": left and right by turns) to the longest plus `extra`."""
    width = max(s.length for s in samples) + extra
    ids = torch.full((len(samples), width), fill)
    labels = torch.full((len(samples), width), -100)
    mask = torch.zeros((len(samples), width), dtype=torch.long)
    for row, sample in enumerate(samples):
        left = side == "left" or (side == "mixed" and row % 2 == 0)
        start = width - sample.length if left else 0
        place = slice(start, start + sample.length)
        ids[row, place], labels[row, place], mask[row, place] = sample.input_ids, sample.labels, 1
    return Batch(ids, labels, mask, None, join_media(samples))


@dataclass(frozen=True)
class Zoo:
    """One model of zoo, with what it was built from."""

    recipe: Any
    assembly: Any
    model: torch.nn.Module
    world: Any

    @classmethod
    def load(cls, folder: Path, world: Any, *overrides: str) -> Zoo:
        """Weights of a Hugging Face folder, in training mode."""
        return cls.from_recipe(recipe_for(folder, *overrides), world)

    @classmethod
    def from_recipe(cls, recipe: Any, world: Any) -> Zoo:
        """A recipe's model with its first weights, in training mode."""
        assembly, chunks = load_model(recipe, world)
        return cls(recipe, assembly, chunks[0].train(), world)

    def step(self, **packing: Any) -> Any:
        """The family's step; `packing` replaces keys of the recipe's packing section."""
        from zoo.model.build import build_step

        recipe = replace(self.recipe, packing=replace(self.recipe.packing, **packing))
        return build_step(self.assembly, recipe, self.world)

    @torch.no_grad()
    def logits(self, batch: Any, **packing: Any) -> list[Tensor]:
        """(L, vocab) of the real tokens of each sample of the batch."""
        step = self.step(**packing)
        layout = step.pack(batch, step.capture(batch)).layout  # of rows whose placeholders are expanded
        out = self.model(step.prepare(batch, logits=True)[0])
        rows = list(out) if step.packing.mode == "none" else list(out[0].split(layout.padded_lengths))
        return [row[:length] for row, length in zip(rows, layout.lengths, strict=True)]

    def gradients(self, batches: Sequence[Any], labels: int, **packing: Any) -> tuple[float, dict[str, Tensor | None]]:
        """(loss, gradient by parameter name) of the token mean over `labels`, accumulated over `batches`."""
        step = self.step(**packing)
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            output, loss_function = step(iter([batch]), self.model, loss_scale=1.0 / max(labels, 1))
            loss, _ = loss_function(output)
            loss.backward()
            total += float(loss.detach())
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        found = {n: None if p.grad is None else p.grad.clone() for n, p in trained.items()}
        self.model.zero_grad(set_to_none=True)
        return total, found

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by zoo's parameter names as those of the bridge's published Hugging Face names."""
        from zoo.model.build import model_dims

        bridge, dims = self.assembly.family.load("bridge"), model_dims(self.assembly)
        out: dict[str, Tensor] = {}
        for name, entry in bridge.publish(tensors).items():
            transform = entry.layout.transform
            if not entry.rule.stacked:
                out.update(zip(entry.hf_names(), transform.to_hf(tensors[name], dims), strict=True))
                continue
            experts = [transform.to_hf(tensor, dims) for tensor in tensors[name]]
            if not entry.layout.per_expert:
                stacks = map(torch.stack, zip(*experts, strict=True))
                out.update(zip(entry.hf_names(), stacks, strict=True))
                continue
            for expert, parts in enumerate(experts):
                out.update(zip(entry.hf_names(expert), parts, strict=True))
        return out
