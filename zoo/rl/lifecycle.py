"""The life of an engine: opened on the ranks of this process and its peers, moved to and fro, saved, and closed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from zoo.config.checks.effects import refuse_without_effect
from zoo.config.compose import load_recipe
from zoo.config.derived import data_parallel
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError
from zoo.launch.slurm import join_slurm
from zoo.optim.device_memory import KINDS, Kind, Memory, Moved
from zoo.parallel.megatron.core_import import import_core
from zoo.parallel.object_group import refuse_different
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.world import World, groups, settings
from zoo.planner.plan_process import planned
from zoo.rl.batch import Sparse
from zoo.rl.checkpoints import Checkpoints, Counts
from zoo.rl.parts import EngineParts, build_parts
from zoo.rl.passes import Passes
from zoo.rl.training import Training
from zoo.rollouts.published_weights import PublishedWeights


@dataclass
class Ranks:
    """The process groups that an engine and those opened beside it share."""

    world: World
    stack: ExitStack  # destroys them
    engines: list[OpenModel] = field(default_factory=list)  # open ones


class OpenModel:
    """A model that is open on this rank; `zoo.Engine` adds what a loop calls it for."""

    def __init__(self, recipe: Recipe, ranks: Ranks, parts: EngineParts, stack: ExitStack) -> None:
        """`open` makes these; `stack` lets go of the model."""
        world = ranks.world
        self.recipe, self.device = recipe, world.device
        self.dp_rank, self.dp_size = world.dp_rank, world.dp_size
        self.processor = parts.assembly.processor.hf
        self._ranks, self._world, self._parts, self._stack = ranks, world, parts, stack
        budget, align = recipe.packing.budget, recipe.packing.align or 1
        self._passes: Passes | None = Passes(parts.step, parts.chunks, world, budget, align)
        self._memory = Memory(parts.chunks, parts.optimizer)
        self._weights = PublishedWeights(parts.assembly, parts.chunks, parts.adapters, world)
        self._checkpoints = Checkpoints(recipe, world, parts)
        config = parts.chunks[0].config
        self._sparse: Sparse | None = None
        if config.num_moe_experts:
            layers = sum(config.moe_layer_freq)
            self._sparse = Sparse(layers, config.num_moe_experts, config.moe_router_topk)
        self._training = Training(recipe, world, parts, self._passes) if parts.optimizer is not None else None
        ranks.engines.append(self)

    @classmethod
    def open(
        cls,
        recipe: Recipe | str | Path,
        overrides: Overrides = (),
        *,
        train: bool = True,
        beside: OpenModel | None = None,
    ) -> Self:
        """Start the process groups, build the recipe's model and load its weights. Every rank calls it.

        Args:
            recipe: as `zoo.load_recipe` takes it; its data and its run folder are not used, unless adapters belong to weights
                that have no Hugging Face folder: those are written to `base/` in the run folder.
            train: False leaves gradients and optimizer out, for a model that only gives log-probabilities.
            beside: an open engine whose process groups this one shares, as a reference model does that lies on the same ranks.
                Both recipes must have the same parallel sizes.

        Raises:
            UserError: the recipe cannot run on these ranks, another engine is open, or the weights do not fit.
        """
        recipe = load_recipe(recipe, overrides)
        refuse_without_effect(recipe)
        with preserve_process_state():
            import_core()
            if beside is None and not dist.is_initialized():
                join_slurm()
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
            recipe = validate(planned(_for_loops(recipe, size), size), size)
            if beside is not None:
                beside._open()
                if recipe.parallel != beside.recipe.parallel:
                    raise UserError(
                        "the recipe has other parallel sizes than that of the engine beside which it is to be opened; give it the same"
                    )
            stack, of_groups = ExitStack(), ExitStack()
            with settings(recipe, None if beside is None else beside.device) as device, ExitStack() as failed:
                failed.enter_context(stack)
                failed.enter_context(of_groups)
                if beside is None:
                    ranks = Ranks(of_groups.enter_context(groups(recipe, device)), of_groups)
                else:
                    ranks = beside._ranks
                refuse_different(recipe)
                parts = build_parts(recipe, ranks.world, stack, train=train)
                failed.pop_all()
            return cls(recipe, ranks, parts, stack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, and destroy the process groups that zoo made once no engine uses them. Every rank calls it.

        Tensors that `hf_weights` has handed out stay as they are. A second call does nothing.
        """
        if self._passes is None:
            return
        self._passes = self._training = None
        del self._parts, self._memory, self._weights, self._checkpoints
        self._ranks.engines.remove(self)
        with settings(self.recipe, self.device):
            self._stack.close()
            if not self._ranks.engines:
                self._ranks.stack.close()
        gc.collect()  # modules, DDP and the optimizer hold one another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._passes is None

    @property
    def dp_group(self) -> torch.distributed.ProcessGroup:
        """The torch.distributed group of this rank and its like in the other replicas."""
        return self._world.groups.dp

    @property
    def counts_outputs(self) -> bool:
        """Whether this is the rank of its replica whose results a loop collects: the last stage's, first tensor and context parallel one."""
        return self._world.counts_loss and self._world.cp_rank == 0

    @property
    def learning_rate(self) -> float:
        """That of the next update; UserError for an engine that was opened without training."""
        self._open()
        return self._trained().learning_rate

    def save(self, folder: str | Path, step: int) -> Path:
        """Write a checkpoint: weights, optimizer state, schedule. Every rank calls it, with the same folder.

        The folder becomes that of a run: `zoo convert` and `zoo generate` take it, and so does `model.init`.

        Returns:
            `checkpoints/iter_{step}` in the folder; `train.keep` of the recipe says how many stay there.

        Raises:
            UserError: the engine is closed, was opened without training, or something of it is on the host.
        """
        self._open(*KINDS, call="save")
        with settings(self.recipe, self.device):
            counts = self._training.counts if self._training is not None else Counts()
            return self._checkpoints.save(Path(folder), step, counts)

    def load(self, folder: str | Path) -> int:
        """Go on from the newest whole checkpoint of a folder, saved under whatever layout; returns its step.

        Raises:
            UserError: there is none, it is of another model, or what `save` raises.
        """
        self._open(*KINDS, call="load")
        with settings(self.recipe, self.device):
            step, counts = self._checkpoints.load(Path(folder))
            if self._training is not None:
                self._training.counts = counts
            return step

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, gradients: bool = True) -> Moved:
        """Move weights, optimizer state and gradients to the host, or back to this rank's device.

        The device's memory is given back while they are on the host, so that an inference engine can have it. Gradients are not
        copied: they are zero when they are back. On a machine without a GPU, "cuda" means the device all the same.

        Args:
            device: "cpu" or "cuda".
            model: whether weights are moved; those that are there already stay.
            optimizer: the same of the optimizer's state.
            gradients: the same of gradients.

        Returns:
            Bytes moved, by kind, and seconds.

        Raises:
            UserError: another device, or the engine is closed.
        """
        self._open()
        if device not in ("cpu", "cuda"):
            raise UserError(f'engine.to({device!r}): wanted "cpu" or "cuda", which is this rank\'s device')
        wanted: dict[Kind, bool] = {"model": model, "optimizer": optimizer, "gradients": gradients}
        if self._training is not None and gradients and device == "cpu":
            self._training.tokens = 0  # gradients are not kept
        with settings(self.recipe, self.device):
            return self._memory.move(device == "cuda", [kind for kind in KINDS if wanted[kind]])

    def load_weights(self, path: str | Path) -> None:
        """Put the weights of a Hugging Face folder, or of what else `model.init` names, in the place of those at hand.

        Moments of the optimizer stay. Every rank calls it.

        Raises:
            UserError: there are no such weights, they are of another model, the model has adapters, or it is on the host.
        """
        self._open("model", "optimizer", call="load_weights")
        with settings(self.recipe, self.device):
            self._checkpoints.load_weights(str(path))

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The weights without their LoRA adapters inside the block, which are a reference model's; for `logprobs` and `entropy`.

        Raises:
            UserError: the model has no adapters, or the engine is closed.
        """
        self._open()
        with self._weights.without_adapters():
            yield

    def _trained(self) -> Training:
        if self._training is None:
            raise UserError("the engine was opened with train=False; open it with train=True to take steps")
        return self._training

    def _open(self, *kinds: Kind, call: str = "this call") -> Passes:
        """The passes of an open engine, of which these kinds are on the device."""
        if self._passes is None:
            raise UserError("the engine is closed; open another one with zoo.Engine.open(recipe)")
        self._memory.refuse_away(kinds, call)
        return self._passes


def _for_loops(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe without losses that are not the caller's, with a batch that fits any layout, and towers for the rows of a rank alone."""
    batch = max(1, data_parallel(recipe, ranks)) * recipe.train.micro_batch * recipe.parallel.pp
    losses = dict.fromkeys(("train.mtp_loss", "train.aux_loss", "train.z_loss"), 0.0)
    plan = [name for name in recipe.parallel.plan if name != "towers"]
    own = {"parallel.towers": "own", "parallel.plan": plan}
    return recipe.replace({**losses, **own, "train.global_batch": batch})
