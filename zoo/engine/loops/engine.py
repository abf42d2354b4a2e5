"""`zoo.Engine`: a recipe's model for loops that are not zoo's, on the ranks of this process and its peers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.bridge.weight_stream import BUCKET
from zoo.config.derived import data_parallel
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.engine.distributed.determinism import plain_fp32
from zoo.engine.distributed.object_group import refuse_different
from zoo.engine.distributed.process_state import untouched
from zoo.engine.distributed.world import World, groups, settings
from zoo.engine.launch.core_import import import_core
from zoo.engine.launch.slurm import join_slurm
from zoo.engine.loops.batch import Rows, Sparse
from zoo.engine.loops.memory import KINDS, Kind, Memory, Moved
from zoo.engine.loops.parts import EngineParts, build_parts
from zoo.engine.loops.passes import LossFunction, Passes
from zoo.engine.loops.training import StepOutcome, Training
from zoo.engine.loops.weights import Weights
from zoo.engine.planning.plan_process import planned
from zoo.errors import UserError


class Engine:
    """A recipe's model for a loop that computes its own losses, such as one of reinforcement learning.

        with zoo.Engine.open(recipe) as engine:
            batch["old"] = engine.logprobs(batch)
            outcome = engine.train_step(batch, loss_fn)

    There is one process a rank, and every rank makes the same calls. The process is a rank of the caller's torch.distributed
    where that is initialised, of torchrun where that started it, or a single one. Ranks of one replica (tensor, pipeline and
    context parallel ones) pass the same batch; each of the `dp_size` replicas passes its own.

    A batch is a mapping. zoo packs its rows into micro-batches of up to `packing.budget` tokens; results come back padded.

    - `input_ids` (B, T) int64, `attention_mask` (B, T) bool or int: rows padded on the left, on the right, or both.
    - `loss_mask` (or `response_mask`), (B, T) bool or int, optional: the tokens whose log-probabilities are wanted, each
      standing at its own place, not that of the token before it. Without it they are given for all tokens.
    - `media` (or `multi_modal_inputs`), optional: a list of B, for each row what the Hugging Face processor returned of its
      media (`pixel_values`, `image_grid_thw`, ...), of all turns in order, or None.
    - `routing` (B, T, layers, k) int, optional: experts to take, as `logprobs_and_routing` gives them.
    - Anything else is for the caller's loss: tensors and lists with B entries are handed over row by row.

    Routers' auxiliary losses and multi-token prediction are off. Between two calls the process is the caller's: what zoo sets
    in torch and the environment is undone after each call. One engine can be open at a time.

    Attributes:
        recipe: as it was resolved.
        device: this rank's.
        dp_rank, dp_size: this rank's replica, and how many there are.
        processor: the Hugging Face processor.
    """

    def __init__(self, recipe: Recipe, world: World, parts: EngineParts, stack: ExitStack) -> None:
        """`open` makes engines."""
        self.recipe, self.device = recipe, world.device
        self.dp_rank, self.dp_size = world.dp_rank, world.dp_size
        self.processor = parts.assembly.processor.hf
        self._world, self._parts, self._stack = world, parts, stack
        self._passes: Passes | None = Passes(
            parts.step, parts.chunks, world, recipe.packing.budget, recipe.packing.align or 1
        )
        self._memory, self._weights = Memory(parts), Weights(parts, world)
        config = parts.chunks[0].config
        self._sparse: Sparse | None = None
        if config.num_moe_experts:
            layers = sum(config.moe_layer_freq)
            self._sparse = Sparse(layers, config.num_moe_experts, config.moe_router_topk)
        self._training = Training(recipe, world, parts, self._passes) if parts.optimizer is not None else None

    @classmethod
    def open(cls, recipe: Recipe, *, train: bool = True) -> Engine:
        """Start the process groups, build the recipe's model and load its weights. Every rank calls it.

        Args:
            recipe: as `zoo.load_recipe` gives it; its data and its run folder are not used, unless adapters belong to weights
                that have no Hugging Face folder: those are written to `base/` in the run folder.
            train: False leaves gradients and optimizer out, for a model that only gives log-probabilities.

        Raises:
            UserError: the recipe cannot run on these ranks, another engine is open, or the weights do not fit.
        """
        with untouched():
            import_core()
            if not dist.is_initialized():
                join_slurm()
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
            recipe = validate(planned(_for_loops(recipe, size), size), size)
            stack = ExitStack()
            with settings(recipe) as device, ExitStack() as failed:
                failed.enter_context(stack)
                world = stack.enter_context(groups(recipe, device))
                refuse_different(recipe)
                parts = build_parts(recipe, world, stack, train=train)
                failed.pop_all()
            return cls(recipe, world, parts, stack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and destroy the process groups that zoo made. Every rank calls it; a second call does nothing.

        Tensors that `hf_weights` has handed out stay as they are.
        """
        if self._passes is None:
            return
        self._passes = self._training = None
        del self._parts, self._memory, self._weights
        with settings(self.recipe, self.device):
            self._stack.close()
        gc.collect()  # modules, DDP and the optimizer hold one another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def logprobs(self, batch: Mapping[str, Any], *, temperature: float | Tensor = 1.0) -> Tensor:
        """Log-probability of each token given those before it in its row.

        Args:
            batch: as the class describes it.
            temperature: logits are divided by it; a number, or (B,) for the rows.

        Returns:
            (B, T) fp32 on this rank's device, the same on all ranks of a replica: at each token that token's own, and 0 on
            padding, at a row's first token and where `loss_mask` is 0.

        Raises:
            ValueError: the batch is not as described, or a row is longer than `packing.budget`.
            UserError: the engine is closed.
        """
        return self._values(batch, temperature, entropy=False)["logprobs"]

    def entropy(self, batch: Mapping[str, Any], *, temperature: float | Tensor = 1.0) -> Tensor:
        """Entropy in nats of the distribution that each token was drawn from; arguments, layout and errors of `logprobs`."""
        return self._values(batch, temperature, entropy=True)["entropy"]

    def train_step(
        self,
        batch: Mapping[str, Any],
        loss_fn: LossFunction,
        loss_scale: float | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        update: bool = True,
    ) -> StepOutcome:
        """Update the weights by the gradient of a loss of log-probabilities.

        The loss is `loss_scale` times the sum of what `loss_fn` returns for the micro-batches of all replicas, so that neither
        micro-batches nor the parallel layout change the gradient.

        Args:
            batch: as the class describes it.
            loss_fn: called with the log-probabilities (b, T) of some rows, as `logprobs` lays them out, and with these rows of
                the batch as a dict. It returns the sum of the loss over their tokens, or that and a dict of numbers that are
                summed up. Every tensor and context parallel rank calls it with the same values.
            loss_scale: None: 1 / the number of tokens that `loss_mask` chooses in all replicas.
            temperature: logits are divided by it; a number, or (B,) for the rows.
            entropy: `loss_fn` also gets the keyword `entropy`, (b, T), differentiable.
            update: False leaves the gradients as they are, for `update` to use. The next step begins with none.

        Raises:
            ValueError: the batch is not as described, a row is longer than `packing.budget`, or `loss_fn` returned no number.
            UserError: the engine is closed, or was opened without training.
        """
        self._open(*KINDS)
        training = self._trained()
        rows = self._read(batch, temperature)
        if rows.experts is not None and self.recipe.engine.recompute == "selective":
            raise UserError(
                "the batch has routing, which engine.recompute=selective would lose in the backward pass; open the engine with "
                "engine.recompute=full or none"
            )
        with settings(self.recipe, self.device), torch.enable_grad():
            return training.step(rows, loss_fn, loss_scale, entropy=entropy, update=update)

    def update(self) -> tuple[float, bool]:
        """Update the weights by the gradients that `train_step(..., update=False)` has left; returns their norm and whether they were applied."""
        self._open(*KINDS)
        with settings(self.recipe, self.device):
            return self._trained().update()

    def hf_weights(
        self, *, dtype: torch.dtype | None = None, bucket: int = BUCKET
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's weights as they are now: published names and whole tensors, for an inference engine say.

        They are those that an export writes, to the bit, adapters merged; tensors that zoo does not train (a talker, depths of
        multi-token prediction) are left out, as they are still those of `model.init`. Every rank iterates, to the end, and gets
        every tensor on its device, in the same order. Nothing is written to a disk. The plan is made once an engine.

        Args:
            dtype: of all tensors; None: that of the weights that the model began with.
            bucket: bytes that are gathered at once. Beside the tensor in hand a rank holds at most one bucket, or one parameter
                that is larger.

        Raises:
            UserError: the engine is closed, or the model is on the host.
        """
        return self._stream(lambda: self._weights.published(dtype, bucket), "hf_weights")

    def adapter_weights(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The adapters by themselves: PEFT's names and whole tensors, as `hf_weights` gives them, and PEFT's adapter_config.json.

        Raises:
            UserError: the model has no adapters, or what `hf_weights` raises.
        """
        self._open("model")
        config = self._weights.peft_config(self.recipe)
        return self._stream(self._weights.adapters, "adapter_weights"), config

    def _stream(
        self, make: Callable[[], Iterator[tuple[str, Tensor]]], call: str
    ) -> Iterator[tuple[str, Tensor]]:
        """What `make` gives; the caller's code between two tensors runs under its own settings."""
        self._open("model", call=call)
        with settings(self.recipe, self.device):
            tensors = make()
        while True:
            self._open("model", call=call)
            with plain_fp32(), torch.no_grad():
                item = next(tensors, None)
            if item is None:
                return
            yield item

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, gradients: bool = True) -> Moved:
        """Move weights, optimizer state and gradients to the host, or back to this rank's device.

        The device's memory is given back while they are on the host, so that an inference engine can have it. Gradients are not
        copied: they are zero when they are back. On a machine without a GPU, "cuda" means the device all the same.

        Args:
            device: "cpu" or "cuda".
            model, optimizer, gradients: what is moved; what is there already stays.

        Returns:
            Bytes moved, by kind, and seconds.

        Raises:
            UserError: another device, or the engine is closed.
        """
        self._open()
        if device not in ("cpu", "cuda"):
            raise UserError(f'engine.to({device!r}): wanted "cpu" or "cuda", which is this rank\'s device')
        wanted: dict[Kind, bool] = {"model": model, "optimizer": optimizer, "gradients": gradients}
        with settings(self.recipe, self.device):
            return self._memory.move(device == "cuda", [kind for kind in KINDS if wanted[kind]])

    def _trained(self) -> Training:
        if self._training is None:
            raise UserError("the engine was opened with train=False; open it with train=True to take steps")
        return self._training

    def logprobs_and_routing(
        self, batch: Mapping[str, Any], *, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities as `logprobs` gives them, and the experts that each token took.

        Returns:
            (B, T) fp32, and (B, T, layers, k) int16 on this rank's device, the same on all ranks of a replica: layers with experts
            in the model's order, -1 on padding. As `batch["routing"]` of another call they are taken again.

        Raises:
            UserError: the model has no experts, or what `logprobs` raises.
        """
        if self._sparse is None:
            raise UserError("the model has no experts; call logprobs")
        passes, rows = self._open("model"), self._read(batch, temperature)
        with settings(self.recipe, self.device):
            found = passes.values(rows, sparse=self._sparse)
        return found["logprobs"], found["routing"]

    def _read(self, batch: Mapping[str, Any], temperature: float | Tensor) -> Rows:
        return Rows.read(batch, self._parts.assembly.processor, temperature, self._sparse)

    def _values(
        self, batch: Mapping[str, Any], temperature: float | Tensor, *, entropy: bool
    ) -> dict[str, Tensor]:
        passes, rows = self._open("model"), self._read(batch, temperature)
        with settings(self.recipe, self.device):
            return passes.values(rows, entropy=entropy)

    def _open(self, *kinds: Kind, call: str = "this call") -> Passes:
        """The passes of an open engine, of which these kinds are on the device."""
        if self._passes is None:
            raise UserError("the engine is closed; open another one with zoo.Engine.open(recipe)")
        self._memory.refuse_away(kinds, call)
        return self._passes


def _for_loops(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe without losses that are not the caller's, and with a batch that fits any layout."""
    replicas = max(1, data_parallel(recipe, ranks))
    return recipe.replace(
        {
            "train.mtp_loss": 0.0,
            "train.aux_loss": 0.0,
            "train.z_loss": 0.0,
            "train.global_batch": replicas * recipe.train.micro_batch * recipe.parallel.pp,
        }
    )
