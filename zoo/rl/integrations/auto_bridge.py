"""The calls of Megatron-Bridge's AutoBridge that frameworks of reinforcement learning make, on `zoo.Engine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from zoo.config.compose import load_recipe, recipe_for_weights
from zoo.config.locate import locate, read_arch
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model.meta_model import family_of
from zoo.model.run_settings import settings_of
from zoo.rl.engine import Engine


class HFWeightTuple(NamedTuple):
    """A published tensor, as Megatron-Bridge names its fields."""

    param_name: str
    weight: Tensor


class AutoBridge:
    """Weights of a Hugging Face folder into an engine, and out of it.

        bridge = AutoBridge.from_hf_pretrained("Qwen/Qwen3-VL-4B-Instruct", overrides=["parallel.tp=2"])
        engine = bridge.open()
        for name, tensor in bridge.export_hf_weights(engine):
            ...

    `open` stands where Megatron-Bridge gives a provider: a model of zoo comes with its layout, its packing and its optimizer. A
    model is the engine, or a list with it alone.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @classmethod
    def from_hf_pretrained(
        cls, path: str | Path, *, recipe: str | None = None, overrides: Sequence[str] = (), **_: object
    ) -> AutoBridge:
        """Read what the folder holds.

        Args:
            path: a Hugging Face folder, or a hub id.
            recipe: a name that `zoo list` shows, or a file; None: zoo's defaults for the model's family.
            overrides: of the recipe, such as `parallel.tp=2`.

        Other keywords of Megatron-Bridge (trust_remote_code, ...) change nothing: zoo runs no code of a checkpoint.

        Raises:
            UserError: no such folder, or no family has its model.
        """
        source = locate(str(path))
        if recipe is not None:
            return cls(load_recipe(recipe, [f"model.init={source.folder}", *overrides]))
        family = family_of(read_arch(source.files)).name
        return cls(recipe_for_weights(str(source.folder), family, overrides, settings_of(source).layer))

    def open(self, *, train: bool = True, beside: Engine | None = None) -> Engine:
        """The model with its weights; see `zoo.Engine.open`."""
        return Engine.open(self.recipe, train=train, beside=beside)

    def load_hf_weights(self, model: Engine | Sequence[Engine], hf_path: str | Path | None = None) -> Engine:
        """Put the weights of a folder, by default the bridge's own, into an open engine; see `zoo.Engine.load_weights`."""
        engine = _engine(model)
        engine.load_weights(hf_path or self.recipe.model.init)
        return engine

    def export_hf_weights(
        self,
        model: Engine | Sequence[Engine],
        cpu: bool = False,
        show_progress: bool = False,
        conversion_tasks: Iterable[object] | None = None,
        merge_adapter_weights: bool = True,
    ) -> Iterator[HFWeightTuple]:
        """The engine's weights, whole, on its device or on the host; every rank iterates to the end.

        `show_progress` and `conversion_tasks` change nothing: the engine keeps its plan.

        Raises:
            UserError: adapters are not to be merged; `export_adapter_weights` gives them by themselves.
        """
        engine = _engine(model)
        if engine.recipe.lora.rank and not merge_adapter_weights:
            raise UserError(
                "merge_adapter_weights=False: zoo hands out weights with their adapters; take export_adapter_weights for these alone"
            )
        return _weights(engine.hf_weights(), cpu)

    def export_adapter_weights(
        self, model: Engine | Sequence[Engine], cpu: bool = False, show_progress: bool = False
    ) -> Iterator[HFWeightTuple]:
        """The adapters alone, under PEFT's names; UserError where the model has none."""
        return _weights(_engine(model).adapter_weights()[0], cpu)

    def get_conversion_tasks(self, model: Engine | Sequence[Engine]) -> list[object]:
        """Nothing: an engine makes its plan at the first export and keeps it."""
        _engine(model)
        return []


def _engine(model: Engine | Sequence[Engine]) -> Engine:
    if isinstance(model, Engine):
        return model
    (engine,) = model
    return engine


def _weights(tensors: Iterator[tuple[str, Tensor]], cpu: bool) -> Iterator[HFWeightTuple]:
    for name, tensor in tensors:
        yield HFWeightTuple(name, tensor.cpu() if cpu else tensor)
