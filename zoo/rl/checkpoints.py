"""An engine's checkpoints: those of a run, in a folder that every verb of zoo takes for one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from zoo.checkpoint import initial_weights, integrity, loading
from zoo.checkpoint.selection import choose
from zoo.checkpoint.sharded_state import Trainable, to_write
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.writer import ControlGroup, SaveRequest, write
from zoo.config.compose import save_recipe
from zoo.config.locate import locate, read_state
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.nn.adamw.state import MASTER
from zoo.optim.adamw import allocate_state, optimizers
from zoo.parallel.object_group import agreed
from zoo.parallel.world import TIMEOUT, World, cores_beside_gpu
from zoo.rl.parts import EngineParts
from zoo.types import JsonObject


@dataclass
class Counts:
    """What an engine has done so far."""

    train_steps: int = 0  # from which masks of dropout follow
    updates: int = 0  # that the optimizer's state has seen; the schedule may have moved apart from them


class Checkpoints:
    """Saves and loads weights, optimizer state and schedule of an engine; every rank makes the same calls."""

    def __init__(self, recipe: Recipe, world: World, parts: EngineParts) -> None:
        self.recipe, self.world, self.parts = recipe, world, parts
        self._copied = CpuCopy(world.device, cores_beside_gpu(recipe, world) or 1)
        self._control: ControlGroup | None = None
        self._files = integrity.CachedFiles(parts.assembly.save_files)

    def save(self, folder: Path, step: int, counts: Counts) -> Path:
        """Write `checkpoints/iter_{step}` in the folder, and wait until the disk has it; returns its path."""

        def begin() -> None:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            save_recipe(self.recipe, folder / "config.yaml")

        trainable = self._trainable("save")
        self._control = self._control or ControlGroup(TIMEOUT)
        agreed(begin)
        allocate_state(trainable.optimizer)
        state: JsonObject = {
            "step": step,
            **asdict(counts),
            "model": loading.describe(self.recipe, self.parts.assembly.config.hf),
            "weights": loading.origin(self.recipe, self.parts.assembly.source, self.parts.assembly.fp32),
            "ranks": self.world.size,
            "scheduler": trainable.scheduler.state_dict(),
            "optimizer": True,
        }
        request = SaveRequest(folder, state, self.recipe, self._files)
        try:
            held = to_write(trainable, self.world)
            self._copied.take(held.pieces, held.objects)
            write(self._copied, request, self._control)
        finally:
            self._copied.release()
        return request.target

    def load(self, folder: Path) -> tuple[int, Counts]:
        """Load the newest complete checkpoint, saved under any layout; returns its step, and the counts up to it."""
        trainable = self._trainable("load")
        chosen = choose(folder).folder
        if chosen is None:
            raise UserError(f"{folder} has no checkpoint; engine.save writes one")
        state = agreed(lambda: read_state(chosen))
        model = loading.describe(self.recipe, self.parts.assembly.config.hf)
        if state["model"] != model:
            raise UserError(f"{chosen} is of another model than the engine's; wanted one that it has saved")
        allocate_state(trainable.optimizer)
        loading.load(trainable, chosen, self.world, state["ranks"])
        step = int(state["step"])  # the only count of a run of `zoo train`
        updates = loading.updates_of(state, trainable.scheduler.num_steps)
        return step, Counts(int(state.get("train_steps", step)), updates)

    def load_weights(self, init: str) -> None:
        """Take the weights that a recipe's `model.init` names."""
        parts = self.parts
        if parts.adapters is not None:
            raise UserError(
                "engine.load_weights: the model has adapters, which belong to other weights; open an engine with these"
            )
        assembly = replace(parts.assembly, source=agreed(lambda: locate(init)))
        initial_weights.init_weights(list(parts.chunks), assembly, self.recipe, self.world)
        for optimizer in optimizers(parts.optimizer) if parts.optimizer is not None else ():
            for state in optimizer.state.values():
                if state[MASTER].dtype == torch.int16:  # what completed the former bf16 weights to fp32
                    state[MASTER].zero_()

    def _trainable(self, call: str) -> Trainable:
        parts = self.parts
        if parts.optimizer is None:
            raise UserError(f"engine.{call}: the engine was opened with train=False, and has no state to {call}")
        return Trainable(parts.chunks, parts.optimizer, parts.scheduler, parts.adapters)
