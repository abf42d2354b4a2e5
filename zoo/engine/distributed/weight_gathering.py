"""How updated weights come to all data-parallel ranks: once, those of every optimizer by itself, and beside other work.

A model with experts has two of megatron-core's distributed optimizers, for the experts' weights one of its own. Each of them gathers the weights
of both (megatron-core 0.19.2), so everything is sent twice, and first while half of it is not updated yet.

With `parallel.overlap_param_gather` the next forward pass begins meanwhile. megatron-core has such an overlap too, in which each module waits for its
own weights when it is called; zoo's layers read weights of modules that nobody calls. Here a whole layer waits for all weights in it, and whatever
reads weights in other ways waits for all (`settle_all`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

_gatherings: weakref.WeakSet[Gathering] = weakref.WeakSet()


def settle_all() -> None:
    """Have the current stream wait for all weights that are on their way. To be called by whatever reads or writes weights without a forward pass."""
    for gathering in list(_gatherings):
        gathering.settle()


def gather_once(optimizer: Any, chunks: Sequence[Any], *, ahead: bool = False) -> None:
    """Have an optimizer, or those that it is a chain of, gather the weights that they update, and no others.

    On a GPU they are on their way while the next optimizer of a chain updates its own. Weights that no other rank has are not sent.

    Args:
        optimizer: megatron-core's, of model chunks under DDP.
        chunks: these.
        ahead: on a GPU, layers wait for their weights in the next forward pass; if not, the current stream waits for all where the last optimizer is done.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    Gathering(
        [one for one in chain if hasattr(one, "start_param_sync_for_bucket_group_subset")], chunks, ahead
    )


class Gathering:
    """Of a chain of DistributedOptimizers, which hold it."""

    def __init__(self, chain: Sequence[Any], chunks: Sequence[Any], ahead: bool) -> None:
        on_gpu = torch.cuda.is_available()
        self.beside: Any = torch.cuda.Stream() if on_gpu and (ahead or len(chain) > 1) else None
        self.ahead, self.pending = ahead and on_gpu, False
        self._there: dict[Any, Any] = {}  # group of buckets -> event of its arrival
        order = self._waits(chunks) if self.ahead else {}
        for one in chain:
            groups = sorted(_groups(one), key=lambda group: order.get(group, 0))
            one.start_param_sync_for_bucket_group_subset = partial(self._gather, groups, one is chain[-1])
        _gatherings.add(self)

    def settle(self) -> None:
        """Have the current stream wait for all that is on its way."""
        if self.pending:
            torch.cuda.current_stream().wait_stream(self.beside)
            self.pending = False

    def _gather(self, groups: Sequence[Any], last: bool) -> None:
        if self.beside is None:
            for group in groups:
                group.start_param_sync()
            return
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            for group in groups:
                group.start_param_sync()
                if group in self._there:
                    self._there[group].record(self.beside)
        self.pending = True
        if last and not self.ahead:
            self.settle()

    def _waits(self, chunks: Sequence[Any]) -> dict[Any, int]:
        """Have models and layers wait for their weights; groups of buckets -> place in the order in which they are waited for."""
        order: dict[Any, int] = {}
        for chunk in chunks:
            of_weight = chunk.param_to_bucket_group
            for place, (module, weights) in enumerate(_parts(chunk)):
                groups = dict.fromkeys(of_weight[weight] for weight in weights if weight in of_weight)
                for group in groups:
                    order.setdefault(group, place)
                    self._there.setdefault(group, torch.cuda.Event())
                module.register_forward_pre_hook(
                    partial(self._wait, [self._there[group] for group in groups])
                )
        return order

    def _wait(self, events: Sequence[Any], *_: Any) -> None:
        if self.pending:
            for event in events:
                torch.cuda.current_stream().wait_event(event)


def _parts(chunk: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The model of a chunk with the weights that are in none of its layers, then layers of towers and decoder with theirs."""
    model = chunk.module
    while not hasattr(model, "tower_names"):
        model = model.module
    towers = [getattr(model, name, None) for name in model.tower_names()]
    blocks = [block for tower in towers for block in getattr(tower, "blocks", ())]
    layers = [(layer, list(layer.parameters())) for layer in (*blocks, *model.decoder.layers)]
    within = {weight for _, weights in layers for weight in weights}
    yield model, [weight for weight in model.parameters() if weight not in within]
    yield from layers


def _groups(optimizer: Any) -> list[Any]:
    """Groups of buckets that an optimizer updates and several ranks hold."""
    own = {id(bucket) for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets}
    every = [
        group
        for chunk in optimizer.model_chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    return [
        group
        for group in every
        if group.buckets
        and id(group.buckets[0]) in own
        and group.intra_distributed_optimizer_instance_size > 1
    ]
