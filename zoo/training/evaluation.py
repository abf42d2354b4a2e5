"""Loss and exact match on held-out rows, and forward passes without gradients.

Exact match of a row: every labelled token, the end of turn included, is the most likely one given what stands
before it in the row. That is the same as greedy decoding giving exactly the answer: as long as all tokens so far
are right, both see the same prefix. One forward pass instead of one a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from zoo.config.schema import Recipe
from zoo.data.loading.evaluation import EvalBatches, eval_batches
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import MicroBatch
from zoo.parallel.object_group import object_group
from zoo.parallel.world import World
from zoo.steps.packed_step import PackedStep
from zoo.training.eval_metrics import Kinds, RowTable, metric_sums
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

type AuxiliaryPasses = Callable[[Sequence[MicroBatch]], list[MicroBatch]]
"""Gives micro-batches what their loss needs of further forward passes; every rank calls it with as many."""


def recipe_batches(
    recipe: Recipe,
    source: SampleSource,
    world: World,
    *,
    cost: Callable[[SampleSize], int] | None = None,
    every_variant: bool = False,
    rows: Iterable[int] | None = None,
) -> EvalBatches:
    """This rank's micro-batches of a source's rows, packed as the recipe says; arguments as `eval_batches` has them."""
    packing = recipe.packing
    return eval_batches(
        source,
        mode=packing.mode,
        budget=packing.budget,
        micro_batch=recipe.train.micro_batch,
        align=packing.align or 1,
        pad_to=packing.pad_to,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        cost=cost,
        group=object_group(),
        every_variant=every_variant,
        rows=rows,
    )


@contextmanager
def in_eval_mode(chunks: Sequence[MegatronModule]) -> Iterator[None]:
    """Within the block the model chunks are in evaluation mode: no dropout, no auxiliary loss of routers."""
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, before, strict=True):
            chunk.train(training)


@torch.no_grad()
def evaluate(
    step: PackedStep,
    chunks: Sequence[MegatronModule],
    batches: Iterable[MicroBatch | None],
    world: World,
    filler: Callable[[], MicroBatch],
    auxiliary_passes: AuxiliaryPasses | None = None,
) -> JsonObject:
    """Metrics over all rows of `batches` and all ranks.

    Args:
        step: of the model; rows are pairs or labelled answers where it has a loss of these.
        chunks: this rank's model chunks.
        batches: this rank's micro-batches, as many on every rank; None stands for one without rows.
        filler: makes the batch that runs in the place of None, so that all ranks join the collectives.
        auxiliary_passes: those of a loss of preferences, as in training.

    Returns:
        `loss` (mean over labels by their weights), `exact_match` (share of rows), `rows`, and `by_kind`: kind -> exact_match, rows.
        For pairs `loss` is the mean of theirs, `exact_match` that of chosen answers, and there are
        `zoo.steps.objectives.preference.METRICS` too; for labelled answers `exact_match` is that of desirable ones.
    """
    totals = metric_sums(step.preference)
    with in_eval_mode(chunks):
        for batch in batches:
            if auxiliary_passes is not None and step.preference is not None:
                (completed,) = auxiliary_passes([filler() if batch is None else batch])
                batch = None if batch is None else completed
            totals.add(*batch_sums(step, chunks, batch, world, filler), batch)
    return totals.gather(world)


@torch.no_grad()
def batch_sums(
    step: PackedStep,
    chunks: Sequence[MegatronModule],
    batch: MicroBatch | None,
    world: World,
    filler: Callable[[], MicroBatch],
) -> tuple[Kinds, RowTable]:
    """Kinds and sums of a micro-batch's rows, with arguments as `evaluate` has them.

    Both are empty where another rank counts the rows: on earlier pipeline stages and on further context-parallel ranks.
    """
    outputs = _evaluated(step, chunks, filler() if batch is None else batch, world)
    if batch is None or not world.counts_loss:
        return (), ()
    table = torch.stack([outputs[0][f"segment_{name}"] for name in ("nll", "weight", "labels", "correct")])
    if world.groups.cp.size() > 1:  # a row may be spread over them
        torch.distributed.all_reduce(table, group=world.groups.cp)
    return (batch.kinds, table.T.tolist()) if world.cp_rank == 0 else ((), ())


@torch.no_grad()
def segment_logprobs(
    step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World
) -> torch.Tensor | None:
    """(S,) fp32 log-probabilities of each sample's labels, on the device; None on earlier pipeline stages. Every rank calls it."""
    outputs = _evaluated(step, chunks, batch, world)
    if not outputs:
        return None
    total = -outputs[0]["segment_nll"].float()
    if world.groups.cp.size() > 1:
        torch.distributed.all_reduce(total, group=world.groups.cp)
    return total


def compared_logprobs(
    step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World
) -> torch.Tensor | None:
    """`segment_logprobs` of pairs; of S labelled answers (2 S,), of theirs and of the mismatched ones by turns."""
    model_logprobs = segment_logprobs(step, chunks, batch, world)
    if batch.mismatched is None:
        return model_logprobs
    other = segment_logprobs(step, chunks, batch.mismatched, world)
    return None if model_logprobs is None or other is None else torch.stack((model_logprobs, other), dim=1).flatten()


@torch.no_grad()
def token_logprobs(
    step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World
) -> torch.Tensor | None:
    """Log-probability of each label as `PackedStep.logprobs` lays them out, on the device; None on earlier pipeline stages. Every rank calls it."""

    def forward(data: Iterator[MicroBatch], model: MegatronModule) -> tuple[torch.Tensor, Callable[..., object]]:
        inputs, loss_inputs = step.prepare(next(data), logprobs=True)
        output = step.forward(model, inputs)
        return output, lambda output: (output.new_zeros(()), {"logprobs": step.logprobs(output, loss_inputs)})

    outputs = forward_only(forward, chunks, batch, world)
    return outputs[0]["logprobs"] if outputs else None


def _evaluated(
    step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World
) -> list[dict[str, torch.Tensor]]:
    return forward_only(lambda data, model: step(data, model, loss_scale=1.0, evaluate=True), chunks, batch, world)


def forward_only(
    forward_step: Callable[[Iterator[MicroBatch], MegatronModule], tuple[torch.Tensor, Callable[..., object]]],
    chunks: Sequence[MegatronModule],
    batch: MicroBatch,
    world: World,
) -> list[dict[str, torch.Tensor]]:
    """A micro-batch's way through all pipeline stages; every rank calls it.

    Args:
        forward_step: megatron-core's: (batches, model chunk) -> (output, function from it to (loss, values)).

    Returns:
        A list that begins with the values, on the last stage; [] on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    interleaved = len(chunks) > 1
    outputs: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[itertools.repeat(batch) for _ in chunks] if interleaved else itertools.repeat(batch),
        model=list(chunks),
        num_microbatches=world.pp_size if interleaved else 1,  # an interleaved pipeline wants as many as it has stages
        seq_length=batch.input_ids.shape[1],
        micro_batch_size=batch.input_ids.shape[0],
        forward_only=True,
    )
    return outputs
