"""Micro-batches through the model, with or without gradients, and their log-probabilities in the caller's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.parallel.world import World
from zoo.rl.batch import Bin, PaddedRows, Sparse, bins_of, spread
from zoo.steps.packed_step import PackedStep
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type LossFunction = Callable[..., Any]  # what `zoo.Engine.train_step` says


@dataclass(frozen=True)
class Micro:
    """One micro-batch on its way through the pipeline."""

    rows: PaddedRows
    bin: Bin
    filler: int  # a token of text, which runs where there is no row


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a model over a loop's batches.

    Attributes:
        step: the family's PackedStep.
        chunks: this rank's model chunks.
        world: the process groups.
        budget, align: tokens of a micro-batch, and what each row is padded to.
    """

    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World
    budget: int
    align: int

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
        outputs = self._schedule(
            rows,
            bins,
            lambda values, micro: (next(iter(values.values())).sum(), values),
            entropy=entropy,
            forward_only=True,
            noted=noted,
        )
        names = ("logprobs", "entropy") if entropy else ("logprobs",)
        whole = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in names}
        for bin_rows, values in zip(bins, outputs, strict=False):
            if bin_rows:
                for name in names:
                    whole[name][torch.tensor(bin_rows, device=device)] = values[name].float()
        results = {name: self._from_last_stage(value) for name, value in whole.items()}
        if noted is not None:
            for group in (self.world.groups.tp_cp, self.world.groups.pp):
                if group.size() > 1:  # each token's are on one rank, or alike on several, and -1 on the others
                    dist.all_reduce(noted, op=dist.ReduceOp.MAX, group=group)
            results["routing"] = noted.to(torch.int16)
        return results

    def gradients(
        self, rows: PaddedRows, loss_fn: LossFunction, scale: float, *, entropy: bool
    ) -> tuple[list[JsonObject], int]:
        """Accumulate the gradient of `scale` times the sum of `loss_fn` over all micro-batches of all replicas.

        Returns:
            of each micro-batch, on the last pipeline stage, `loss`, scaled, and what else the function returned; and the number of
            this rank's micro-batches.
        """
        bins = self.bins(rows)
        for chunk in self.chunks:
            chunk.train()
        # What DDP and megatron-core's schedule divide by: replicas, of which the mean is taken, and micro-batches.
        divisor = self.world.dp_size * len(bins)

        def loss(values: dict[str, Tensor], micro: Micro) -> tuple[Tensor, JsonObject]:
            if not micro.bin:
                return values["logprobs"].sum() * 0.0, {}
            total, metrics = _called(loss_fn, values, micro.rows.part(micro.bin, self.world.device))
            total = total * scale
            return total * divisor, {**metrics, "loss": total.detach()}

        return self._schedule(rows, bins, loss, entropy=entropy, forward_only=False), len(bins)

    def _schedule(
        self,
        rows: PaddedRows,
        bins: Sequence[Bin],
        loss: Callable[[dict[str, Tensor], Micro], tuple[Tensor, JsonObject]],
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

        def forward(
            data: Iterator[Micro], model: MegatronModule
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, JsonObject]]]:
            micro = next(data)
            taken, heat = micro.rows.take(micro.bin, micro.filler), micro.rows.temperatures(micro.bin)
            experts: Tensor | Literal["noted"] | None = micro.rows.routing(micro.bin)
            if experts is None and noted is not None:
                experts = "noted"
            inputs, about = step.prepare(taken, logprobs=True, entropy=entropy, temperature=heat, experts=experts)

            def of_output(output: Tensor) -> tuple[Tensor, JsonObject]:
                values = {"logprobs": step.logprobs(output, about)}
                if entropy:
                    values["entropy"] = step.entropy(output, about)
                return loss(values, micro)

            output = step.forward(model, inputs)
            if noted is not None and micro.bin:
                assert inputs.routing is not None and about.token_source is not None
                self._note(noted, micro.bin, inputs.routing, about.token_source)
            return output, of_output

        media = {token for tokens in step.tower_tokens().values() for token in tokens}
        filler = next(token for token in range(len(media) + 1) if token not in media)
        micros = [Micro(rows, rows_of_bin, filler) for rows_of_bin in bins]
        results: list[JsonObject] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micros) for _ in chunks] if len(chunks) > 1 else iter(micros),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micros),
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

    def _from_last_stage(self, value: Tensor) -> Tensor:
        """The last pipeline stage's tensor, on all stages."""
        group = self.world.groups.pp
        if group.size() > 1:
            dist.broadcast(value, src=dist.get_process_group_ranks(group)[-1], group=group)
        return value


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
