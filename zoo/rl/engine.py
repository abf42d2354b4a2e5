"""`zoo.Engine`: a recipe's model for loops that are not zoo's, on the ranks of this process and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zoo.bridge.weight_shards import WeightShard
from zoo.bridge.weight_stream import BUCKET
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.generation.sampling import Sampling
from zoo.optim.device_memory import KINDS
from zoo.parallel.determinism import plain_fp32
from zoo.parallel.world import settings
from zoo.rl.batch import PaddedRows
from zoo.rl.generation import Generated, generate
from zoo.rl.lifecycle import OpenModel
from zoo.rl.passes import LossFunction
from zoo.rl.training import StepOutcome
from zoo.types import JsonMapping, JsonObject


class Engine(OpenModel):
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
    in torch and the environment is undone after each call. Engines that are open together share their process groups.

    Attributes:
        recipe: as it was resolved.
        device: this rank's.
        dp_rank, dp_size: this rank's replica, and how many there are.
        processor: the Hugging Face processor.
    """

    def logprobs(self, batch: JsonMapping, *, temperature: float | Tensor = 1.0) -> Tensor:
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
        return self._values(batch, temperature)["logprobs"]

    def entropy(self, batch: JsonMapping, *, temperature: float | Tensor = 1.0) -> Tensor:
        """Entropy in nats of the distribution that each token was drawn from; arguments, layout and errors of `logprobs`."""
        return self._values(batch, temperature, entropy=True)["entropy"]

    def train_step(
        self,
        batch: JsonMapping,
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
        with settings(self.recipe, self.device), torch.enable_grad():
            return training.step(rows, loss_fn, loss_scale, entropy=entropy, update=update)

    def update(self, *, advance: bool = True) -> tuple[float, bool]:
        """Update the weights by the gradients that `train_step(..., update=False)` has left; returns their norm and whether they were applied.

        `advance=False` leaves the learning rate as it is, for a loop that makes several updates at each of its steps.
        """
        self._open(*KINDS)
        with settings(self.recipe, self.device):
            return self._trained().update(advance=advance)

    def advance_schedule(self) -> float:
        """Move the learning rate's schedule by one step, as an update does; returns the rate of the next update."""
        self._open()
        return self._trained().advance()

    def clear_gradients(self) -> None:
        """Make all gradients zero, as each `train_step` does at its beginning."""
        self._open("gradients")
        self._trained().clear()

    def generate(
        self,
        rows: Sequence[Row | JsonMapping],
        *,
        samples: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        batch: int = 64,
    ) -> Generated:
        """Answer rows with the weights as they are now, several times each.

        An inference engine is faster for models of a published size; this one needs none, and takes no memory of its own.

        Args:
            rows: the same on every rank: rows of a data set, or dicts as in JSONL, whose last answer is left out of the prompt.
                A replica gets the answers to each `dp_size`-th row.
            samples: answers to each row, drawn apart from one another.
            max_new_tokens: most tokens of an answer.
            temperature: as `zoo.generate` takes it; 0: the most likely token.
            top_p: as `zoo.generate` takes it.
            seed: of the draws; another seed gives other answers.
            batch: most prompts that are answered at once.

        Raises:
            RowError: a row can't be used (under data.on_error=raise; else it is left out).
            UserError: the engine is closed, or the model is on the host.
        """
        self._open("model")
        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        with settings(self.recipe, self.device), torch.no_grad():
            return generate(self._parts, self.recipe, self._world, rows, samples, sampling, batch)

    def hf_weights(self, *, dtype: torch.dtype | None = None, bucket: int = BUCKET) -> Iterator[tuple[str, Tensor]]:
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

    def hf_shards(self, *, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """This rank's own blocks of what `hf_weights` gives, each with its place, for receivers that are cut another way.

        Nothing is exchanged after the first call, which plans and is every rank's. Blocks are views of the weights where these lie
        together: an update changes them.

        Args:
            dtype: of all blocks; None: that of the weights that the model began with.

        Raises:
            UserError: the engine is closed, or the model is on the host.
        """
        return self._stream(lambda: self._weights.shards(dtype), "hf_shards")

    def adapter_weights(self) -> tuple[Iterator[tuple[str, Tensor]], JsonObject]:
        """The adapters by themselves: PEFT's names and whole tensors, as `hf_weights` gives them, and PEFT's adapter_config.json.

        Raises:
            UserError: the model has no adapters, or what `hf_weights` raises.
        """
        self._open("model")
        config = self._weights.peft_config(self.recipe)
        return self._stream(self._weights.adapters, "adapter_weights"), config

    def _stream[T](self, make: Callable[[], Iterator[T]], call: str) -> Iterator[T]:
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

    def logprobs_and_routing(self, batch: JsonMapping, *, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities as `logprobs` gives them, and the experts that each token took.

        Returns:
            (B, T) fp32, and (B, T, layers, k) int16 on this rank's device, the same on all ranks of a replica: layers with experts
            in the model's order, -1 on padding. As `batch["routing"]` of another call they are taken again.

        Raises:
            UserError: the model has no experts, or what `logprobs` raises.
        """
        if self._sparse is None:
            raise UserError("the model has no experts; call logprobs")
        values = self._values(batch, temperature, routing=True)
        return values["logprobs"], values["routing"]

    def _read(self, batch: JsonMapping, temperature: float | Tensor) -> PaddedRows:
        return PaddedRows.read(batch, self._parts.assembly.processor, temperature, self._sparse)

    def _values(
        self, batch: JsonMapping, temperature: float | Tensor, *, entropy: bool = False, routing: bool = False
    ) -> dict[str, Tensor]:
        passes, rows = self._open("model"), self._read(batch, temperature)
        with settings(self.recipe, self.device):
            return passes.values(rows, entropy=entropy, sparse=self._sparse if routing else None)
