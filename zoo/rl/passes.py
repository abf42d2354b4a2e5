"""Micro-batches through the model, with or without gradients, and their log-probabilities in the caller's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.packing.binning import Bin, spread
from zoo.parallel.world import World
from zoo.rl.batch import PaddedRows, Sparse, bins_of
from zoo.steps.packed_step import PackedStep
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type LossFunction = Callable[..., Any]  # what `zoo.Engine.train_step` says


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a model over a loop's batches."""

    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World
    budget: int  # tokens of a micro-batch
    align: int  # what each row is padded to a multiple of

    def bins(self, rows: PaddedRows) -> list[Bin]:
        """Micro-batches of this rank, at least one: as many as those of the ranks that it exchanges tokens of experts with."""
        bins = bins_of(rows.lengths, self.budget, self.align)
        count = max(1, len(bins))
        if self.world.groups.ep.size() > 1 and self.world.dp_size > 1:
            most = torch.tensor(count, device=self.world.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.world.groups.dp)
            count = int(most)
        if len(self.chunks) > 1:  # the interleaved schedule wants a multiple of the stages
            count = -(-count // self.world.pp_size) * self.world.pp_size
        return spread(bins, count)

    @torch.no_grad()
    def values(self, rows: PaddedRows, *, entropy: bool = False, sparse: Sparse | None = None) -> dict[str, Tensor]:
        """`logprobs`, and with `entropy` that too, each (B, T) fp32 on this rank's device and whole on every rank.

        With `sparse`, the model's layers with experts, also `routing`, (B, T, L, k) int16: the experts of each token.
        """
        bins = self.bins(rows)
        shape, device = tuple(rows.input_ids.shape), self.world.device
        noted = None
        if sparse is not None:
            noted = torch.full((*shape, sparse.layers, sparse.topk), -1, dtype=torch.int32, device=device)
        for chunk in self.chunks:
            chunk.eval()

        def loss(values: dict[str, Tensor], _: Bin) -> tuple[Tensor, JsonObject]:
            return next(iter(values.values())).sum(), values

        outputs = self._schedule(rows, bins, loss, entropy=entropy, forward_only=True, noted=noted)
        names = ("logprobs", "entropy") if entropy else ("logprobs",)
        whole = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in names}
        for bin_rows, values in zip(bins, outputs, strict=False):
            for name in names if bin_rows else ():
                whole[name][torch.tensor(bin_rows, device=device)] = values[name].float()
        pp = self.world.groups.pp
        if pp.size() > 1:
            for value in whole.values():
                dist.broadcast(value, src=dist.get_process_group_ranks(pp)[-1], group=pp)
        if noted is not None:
            for group in (self.world.groups.tp_cp, pp):
                if group.size() > 1:  # each token's are on one rank, or alike on several, and -1 on the others
                    dist.all_reduce(noted, op=dist.ReduceOp.MAX, group=group)
            whole["routing"] = noted.to(torch.int16)
        return whole

    def gradients(
        self, rows: PaddedRows, loss_fn: LossFunction, scale: float, *, entropy: bool
    ) -> tuple[list[JsonObject], int]:
        """Accumulate the gradient of `scale` times the sum of `loss_fn` over all micro-batches of all replicas.

        Returns of each micro-batch, on the last pipeline stage, `loss`, scaled, and what else the function returned; and how many this
        rank has.
        """
        bins = self.bins(rows)
        for chunk in self.chunks:
            chunk.train()
        # What DDP and megatron-core's schedule divide by: replicas, of which the mean is taken, and micro-batches.
        divisor = self.world.dp_size * len(bins)

        def loss(values: dict[str, Tensor], bin_rows: Bin) -> tuple[Tensor, JsonObject]:
            if not bin_rows:
                return values["logprobs"].sum() * 0.0, {}
            total, metrics = _called(loss_fn, values, rows.part(bin_rows, self.world.device))
            total = total * scale
            return total * divisor, {**metrics, "loss": total.detach()}

        return self._schedule(rows, bins, loss, entropy=entropy, forward_only=False), len(bins)

    def _schedule(
        self,
        rows: PaddedRows,
        bins: Sequence[Bin],
        loss: Callable[[dict[str, Tensor], Bin], tuple[Tensor, JsonObject]],
        *,
        entropy: bool,
        forward_only: bool,
        noted: Tensor | None = None,
    ) -> list[JsonObject]:
        """What `loss` returned beside the loss, of each micro-batch, on the last stage; [] on the others.

        `noted`: gets the experts that this rank's tokens took in its layers.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        step, chunks = self.step, list(self.chunks)
        media = {token for tokens in step.tower_tokens().values() for token in tokens}
        filler = next(token for token in range(len(media) + 1) if token not in media)  # runs where there is no row

        def forward(
            data: Iterator[Bin], model: MegatronModule
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, JsonObject]]]:
            bin_rows = next(data)
            taken, heat = rows.take(bin_rows, filler), rows.temperatures(bin_rows)
            experts: Tensor | Literal["noted"] | None = rows.routing(bin_rows)
            if experts is None and noted is not None:
                experts = "noted"
            inputs, loss_inputs = step.prepare(taken, logprobs=True, entropy=entropy, temperature=heat, experts=experts)

            def of_output(output: Tensor) -> tuple[Tensor, JsonObject]:
                values = {"logprobs": step.logprobs(output, loss_inputs)}
                if entropy:
                    values["entropy"] = step.entropy(output, loss_inputs)
                return loss(values, bin_rows)

            output = step.forward(model, inputs)
            if noted is not None and bin_rows:
                assert inputs.routing is not None and loss_inputs.token_source is not None
                self._note(noted, bin_rows, inputs.routing, loss_inputs.token_source)
            return output, of_output

        results: list[JsonObject] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(bins) for _ in chunks] if len(chunks) > 1 else iter(bins),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(bins),
            seq_length=max(1, rows.input_ids.shape[1]),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _note(self, noted: Tensor, rows: Sequence[int], routing: Routing, source: Tensor) -> None:
        """Put the experts of a micro-batch's tokens on this rank where the caller has the tokens."""
        if self.chunks[0].config.sequence_parallel:
            source = source.chunk(self.world.groups.tp.size())[self.world.tp_rank]
        width, known = noted.shape[1], source >= 0
        columns = torch.tensor(rows)[source[known] // width] * width + source[known] % width
        known, columns = known.to(noted.device), columns.to(noted.device)
        for layer, taken in routing.noted.items():
            noted.flatten(0, 1)[columns, layer] = taken[known].to(noted.dtype)


def _called(loss_fn: LossFunction, values: Mapping[str, Tensor], batch: JsonObject) -> tuple[Tensor, JsonMapping]:
    """The loss that a caller's function gives, and its metrics."""
    further = {name: value for name, value in values.items() if name != "logprobs"}
    result = loss_fn(values["logprobs"], batch, **further)
    total, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(total, Tensor) or total.numel() != 1:
        seen = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(f"loss_fn returned {seen}; wanted one number, the sum over the tokens of its rows")
    if not total.requires_grad:
        raise ValueError("loss_fn returned a loss that does not depend on the log-probabilities; don't detach them")
    numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
    return total.reshape(()), numbers
