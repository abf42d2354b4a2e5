"""Updated weights come to all data-parallel ranks: once, those of every optimizer by itself, and beside other work.

A model with experts has two distributed optimizers of megatron-core, one of them for the experts' weights. By itself each gathers the weights of
both, so all weights are sent twice, and the first time half of them are not updated yet.

With `parallel.overlap_param_gather` the next forward pass begins while weights are gathered. In megatron-core's overlap of the same name each module
waits for its own weights when it is called, but zoo's layers also read weights of modules that nobody calls. Here a layer waits for all weights in
it, and code that reads weights without a forward pass waits for all of the model's (`settle_all`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
    from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer

_gatherings: weakref.WeakSet[Gathering] = weakref.WeakSet()


def settle_all() -> None:
    """Make the current stream wait for all weights that are being gathered. Call it before weights are read or written without a forward pass."""
    for gathering in list(_gatherings):
        gathering.settle()


def gather_once(
    optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], *, ahead: bool = False
) -> None:
    """Make each optimizer of a chain gather the weights that it updates, and no others.

    On a GPU one optimizer's weights are gathered while the next one updates its own. Weights that a single rank has are not sent.

    Args:
        optimizer: megatron-core's DistributedOptimizer, or a chain of several.
        chunks: the model chunks under DDP whose weights it updates.
        ahead: layers on a GPU wait for their weights in the next forward pass. Otherwise the current stream waits for all after the last update.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    distributed = [part for part in chain if hasattr(part, "start_param_sync_for_bucket_group_subset")]
    _gatherings.add(Gathering(distributed, chunks, ahead))


class Gathering:
    """The gathering of weights after an update by a chain of DistributedOptimizers. They hold it as long as they live."""

    def __init__(
        self, chain: Sequence[DistributedOptimizer], chunks: Sequence[DistributedDataParallel], ahead: bool
    ) -> None:
        on_gpu = torch.cuda.is_available()
        self.side_stream = torch.cuda.Stream() if on_gpu and (ahead or len(chain) > 1) else None
        self.ahead, self.pending = ahead and on_gpu, False
        self._arrivals: dict[BucketGroup, torch.cuda.Event] = {}
        order = self._waits(chunks) if self.ahead else {}
        for part in chain:
            groups = sorted(_groups(part), key=lambda group: order.get(group, 0))
            part.start_param_sync_for_bucket_group_subset = partial(self._gather, groups, part is chain[-1])

    def settle(self) -> None:
        """Make the current stream wait for all weights that are being gathered."""
        if self.pending and self.side_stream is not None:
            torch.cuda.current_stream().wait_stream(self.side_stream)
            self.pending = False

    def _gather(self, groups: Sequence[BucketGroup], last: bool) -> None:
        if self.side_stream is None:
            for group in groups:
                group.start_param_sync()
            return
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            for group in groups:
                group.start_param_sync()
                if group in self._arrivals:
                    self._arrivals[group].record(self.side_stream)
        self.pending = True
        if last and not self.ahead:
            self.settle()

    def _waits(self, chunks: Sequence[DistributedDataParallel]) -> dict[BucketGroup, int]:
        """Register hooks in which models and layers wait for their weights; returns the place of each bucket group in the order of these waits."""
        order: dict[BucketGroup, int] = {}
        for chunk in chunks:
            of_weight = chunk.param_to_bucket_group
            for index, (module, weights) in enumerate(_parts(chunk)):
                groups = dict.fromkeys(of_weight[weight] for weight in weights if weight in of_weight)
                for group in groups:
                    order.setdefault(group, index)
                    self._arrivals.setdefault(group, torch.cuda.Event())
                module.register_forward_pre_hook(partial(self._wait, [self._arrivals[group] for group in groups]))
        return order

    def _wait(self, events: Sequence[torch.cuda.Event], *_: object) -> None:
        if self.pending:
            for event in events:
                torch.cuda.current_stream().wait_event(event)


def _parts(chunk: DistributedDataParallel) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """The chunk's model with its weights outside of layers, then each layer of its towers and decoder with its weights, in forward order."""
    model = chunk.module
    while not hasattr(model, "tower_names"):
        model = model.module
    towers = [getattr(model, name, None) for name in model.tower_names()]
    blocks = [block for tower in towers for block in getattr(tower, "blocks", ())]
    layers = [(layer, list(layer.parameters())) for layer in (*blocks, *model.decoder.layers)]
    within = {weight for _, weights in layers for weight in weights}
    yield model, [weight for weight in model.parameters() if weight not in within]
    yield from layers


def _groups(optimizer: DistributedOptimizer) -> list[BucketGroup]:
    """The bucket groups that this optimizer updates and that several ranks hold."""
    bucket_ids = {id(bucket) for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets}
    return [
        group
        for chunk in optimizer.model_chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        if group.buckets and id(group.buckets[0]) in bucket_ids and group.intra_distributed_optimizer_instance_size > 1
    ]
