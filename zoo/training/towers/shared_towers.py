"""`SharedTowers`: ranks that exchange tokens of experts share the work of their towers (parallel.towers=shared).

Such ranks wait for one another in each layer of each micro-batch. Where each encodes the media of its own rows, all wait for the one with
most. Here the items of the micro-batches that a group of ranks trains on at the same time are dealt by their cost:

1. `plan`, once a step on the host, while the device works on the step before: ranks gather the sizes of items, and deal alike.
2. Before a micro-batch: items that leave their replica are exchanged, each rank encodes its own, and one exchange brings embeddings, with
   deepstack's features, to the ranks that read them. There they are leaves of the micro-batch's graph.
3. Behind its backward pass: one exchange brings the leaves' gradients back, and towers have their backward pass.

So as many activations of towers are in memory as without. A rank's gradient is that of the items it encoded. It is summed over data and context
parallel ranks, and is a mean over tensor parallel ones, for which it is scaled up (see `zoo.nn.towers.gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.data.sample import MicroBatch
from zoo.model.build import Assembly, build_step
from zoo.nn.multimodal import MultimodalModel
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import TIMEOUT, World
from zoo.planner.sample_costs import train_factors
from zoo.steps.media import for_towers
from zoo.steps.packed_step import Prepared
from zoo.training.towers.dealt_media import Item, dealt_items, streams_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


@dataclass
class Encoding:
    """What a rank knows of the media of a micro-batch, from its encoding to its backward pass."""

    items: Sequence[Item]  # of all ranks of the group
    made: list[tuple[Tensor, list[Item]]]  # of each tower, with its graph: (N, W), and the items that it is of
    # By tower, the items of this rank's own micro-batch, in the order of their embeddings.
    read: Mapping[str, list[Item]]
    leaves: dict[str, Tensor]  # by tower, (N, W) of these


class SharedTowers:
    """The towers of a model in training. Each rank makes one, and calls its methods in the same order."""

    def __init__(
        self, recipe: Recipe, assembly: Assembly, wrapped: Sequence[DistributedDataParallel], world: World
    ) -> None:
        """`wrapped`: the model, whose schedule has the last micro-batch's towers run their backward pass when it finalizes gradients."""
        self.world, self.chunk = world, wrapped[0]
        self.step = build_step(assembly, recipe, world, encodes_media=False)
        self.model = next(part for part in self.chunk.modules() if isinstance(part, MultimodalModel))
        names, layers = self.model.tower_names(), self.model.deepstack_layers
        self.trained = [name for name in names if isinstance(self.model.zero_of(name), Tensor)]
        self.widths = {name: self.model.config.hidden_size * (1 + layers.get(name, 0)) for name in names}
        costs, factors = assembly.config.tower_costs(), train_factors(assembly.config, recipe)
        self.costs: dict[str, Callable[[float], float]] = {
            name: lambda rows, name=name: factors[name] * costs[name].flops(rows)  # type: ignore[misc]
            for name in names
        }
        parallel = recipe.parallel
        # Whole replicas, and whole groups that share experts.
        size = lcm(parallel.tp * parallel.cp, parallel.etp * parallel.ep)
        blocks = [list(range(first, first + size)) for first in range(0, world.size, size)]
        groups = [(ranks, dist.new_group(ranks, TIMEOUT, "gloo"), dist.new_group(ranks, TIMEOUT)) for ranks in blocks]
        self.ranks, self.on_host, self.on_device = next(group for group in groups if world.rank in group[0])
        places = self._gathered((world.dp_rank, world.cp_rank, world.tp_rank))
        self.homes: dict[int, list[int]] = {}  # the ranks of each replica
        for (replica, *_), rank in sorted(zip(places, self.ranks, strict=True)):
            self.homes.setdefault(replica, []).append(rank)
        self.seats = {rank: home.index(rank) for home in self.homes.values() for rank in home}
        # Tensor-parallel ranks have the same gradients of what they read, so only the first of them sends these back.
        first = {rank for (*_, tp_rank), rank in zip(places, self.ranks, strict=True) if tp_rank == 0}
        self.payers = {replica: [rank for rank in home if rank in first] for replica, home in self.homes.items()}
        self.encoding: Encoding | None = None
        finalize = self.chunk.config.finalize_model_grads_func
        assert finalize is not None  # `wrap_ddp` sets it

        def finalize_behind_towers(*args: Any, **options: Any) -> Any:
            self._finish()
            return finalize(*args, **options)

        self.chunk.config.finalize_model_grads_func = finalize_behind_towers

    def _gathered[T](self, value: T) -> list[T]:
        """The value of each rank of the group."""
        values = [value] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.on_host)
        return values

    def plan(self, batches: Sequence[MicroBatch]) -> list[list[Item]]:
        """The items of each micro-batch of a step, of all ranks of the group, and who encodes them; `batches` are this rank's."""
        every = self._gathered([streams_of(self.step, batch.media) for batch in batches])
        by_rank = dict(zip(self.ranks, every, strict=True))
        homes = list(self.homes.items())
        return [
            dealt_items([(replica, home, by_rank[home[0]][index]) for replica, home in homes], self.costs)
            for index in range(len(batches))
        ]

    def prepared(
        self, plan: Sequence[Sequence[Item]], batches: Sequence[MicroBatch], ready: Iterable[MicroBatch | Prepared]
    ) -> Iterator[Prepared]:
        """A step's micro-batches with what their models read of their media, each encoded when the schedule asks for it.

        Args:
            plan: `plan` of `batches`.
            ready: the same, or what `self.step` has prepared of them.
        """
        for items, batch, known in zip(plan, batches, ready, strict=True):
            self._backward()
            self.encoding = self._encode(items, batch)
            known = known if isinstance(known, Prepared) else Prepared(*self.step.prepare(known))
            yield replace(known, inputs=replace(known.inputs, encoded=self.encoding.leaves))

    def _encode(self, items: Sequence[Item], batch: MicroBatch) -> Encoding:
        """Encode this rank's items, and bring embeddings to the ranks that read them."""
        settle_all()
        rows = self._rows(items, batch)
        own = [item for item in items if item.owner == self.world.rank]
        media: dict[str, Tensor] = {}
        by_stream: dict[str, list[Item]] = {}
        for item in own:
            by_stream.setdefault(item.stream.data, []).append(item)
        for name, of_stream in by_stream.items():
            media[name] = torch.cat([rows[item.number] for item in of_stream])
            media[of_stream[0].stream.sizes] = torch.stack([item.stream.items[item.index] for item in of_stream])
        sizes = {item.stream.sizes for item in own}
        encoded = (
            self.model.encode(for_towers(media, self.step.tower_inputs(media), sizes, self.world.device)) if own else {}
        )
        made: list[tuple[Tensor, list[Item]]] = []
        for tower, streams in self.step.media_streams(media).items() if own else ():
            if streams:  # in the order in which the tower has encoded them
                of_tower = [item for stream in streams for item in by_stream[stream.data]]
                made.append((encoded[tower].joined().to(self.model.config.params_dtype), of_tower))
        read: dict[str, list[Item]] = {}
        for item in items:
            if item.replica == self.world.dp_rank:
                read.setdefault(item.stream.tower, []).append(item)
        return Encoding(items, made, read, self._leaves(items, made, read))

    def _rows(self, items: Sequence[Item], batch: MicroBatch) -> dict[int, Tensor]:
        """Rows of media by number of the item, on the device, of those that this rank encodes: its replica's, and what others send."""
        world = self.world
        senders = {item.number: self._sender(item) for item in items}
        rows: dict[int, Tensor] = {}
        for item in items:
            sender = senders[item.number]
            if item.replica == world.dp_rank and world.rank == (item.owner if sender is None else sender):
                span = batch.media[item.stream.data][item.first : item.first + item.rows]
                rows[item.number] = span.to(world.device, non_blocking=True)
        moving = [item for item in items if senders[item.number] is not None]
        for dtype in sorted({item.stream.dtype for item in moving}, key=str):
            of_type = [item for item in moving if item.stream.dtype == dtype]
            sent = [(item.owner, rows[item.number]) for item in of_type if senders[item.number] == world.rank]
            arriving = [(senders[item.number] or 0, item) for item in of_type if item.owner == world.rank]
            shapes = [(rank, (item.rows, *item.stream.shape)) for rank, item in arriving]
            received = self._exchange(sent, shapes, dtype)
            rows |= {item.number: span for (_, item), span in zip(arriving, received, strict=True)}
        return rows

    def _sender(self, item: Item) -> int | None:
        """The rank that sends an item's rows to the rank that encodes it; None where that has them."""
        home = self.homes[item.replica]
        return None if item.owner in home else home[self.seats[item.owner]]

    def _leaves(
        self, items: Sequence[Item], made: Sequence[tuple[Tensor, list[Item]]], read: Mapping[str, list[Item]]
    ) -> dict[str, Tensor]:
        """Bring what towers made to the ranks that read it; by tower, (N, W) of this rank's micro-batch."""
        if not items:
            return {}
        pieces = {
            item.number: piece
            for output, of_tower in made
            for item, piece in zip(of_tower, output.detach().split([item.outputs for item in of_tower]), strict=True)
        }
        sent = [
            (rank, pieces[item.number]) for item in items if item.number in pieces for rank in self.homes[item.replica]
        ]
        wanted = [item for of_tower in read.values() for item in of_tower]
        shapes = [(item.owner, (item.outputs, self.widths[item.stream.tower])) for item in wanted]
        received = iter(self._exchange(sent, shapes, self.model.config.params_dtype))
        leaves: dict[str, Tensor] = {}
        for tower, of_tower in read.items():
            joined = torch.cat([next(received) for _ in of_tower])
            leaves[tower] = joined.requires_grad_(tower in self.trained)
        return leaves

    def _finish(self) -> None:
        """The backward pass of a step's last micro-batch, after which no tower gets gradients: their reductions may begin."""
        if self.encoding is None:
            return
        self._backward()
        if self.trained:  # on ranks without an item, too, so that reductions begin in the same order on all
            torch.as_tensor(sum(self.model.zero_of(name) for name in self.trained)).backward()

    def _backward(self) -> None:
        """Bring back the gradients of what towers made of the micro-batch that has had its backward pass, and run theirs."""
        encoding, self.encoding = self.encoding, None
        items = [item for item in encoding.items if item.stream.tower in self.trained] if encoding else []
        if encoding is None or not items:
            return
        sent: list[tuple[int, Tensor]] = []
        for tower, of_tower in encoding.read.items():
            if tower in self.trained and self.world.rank in self.payers[self.world.dp_rank]:
                leaf = encoding.leaves[tower]
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                pieces = grad.split([item.outputs for item in of_tower])
                sent += [(item.owner, piece) for item, piece in zip(of_tower, pieces, strict=True)]
        own = [item for item in items if item.owner == self.world.rank]
        paid = [(rank, item) for item in own for rank in self.payers[item.replica]]
        shapes = [(rank, (item.outputs, self.widths[item.stream.tower])) for rank, item in paid]
        received = self._exchange(sent, shapes, self.model.config.params_dtype)
        grads: dict[int, Tensor] = {}
        # Context-parallel ranks have those of their own tokens.
        for (_, item), piece in zip(paid, received, strict=True):
            grads[item.number] = grads[item.number] + piece if item.number in grads else piece
        made = [(output, of_tower) for output, of_tower in encoding.made if output.requires_grad]
        if made:
            tp = self.world.groups.tp.size()
            joined = [torch.cat([grads[item.number] for item in of_tower]) * tp for _, of_tower in made]
            with _accumulating(self.chunk):
                torch.autograd.backward([output for output, _ in made], joined)

    def _exchange(
        self, sent: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, tuple[int, ...]]], dtype: torch.dtype
    ) -> list[Tensor]:
        """Tensors of these shapes from these ranks, for those that go to ranks; each rank has the same order of what goes between two."""
        flat = [piece.reshape(-1) for _, piece in sorted(sent, key=lambda pair: pair[0])]  # of one rank in their order
        data = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self.world.device)
        order = sorted(range(len(wanted)), key=lambda index: wanted[index][0])
        counts = [prod(wanted[index][1]) for index in order]
        from_ranks, to_ranks = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        for index, count in zip(order, counts, strict=True):
            from_ranks[wanted[index][0]] += count
        for rank, piece in sent:
            to_ranks[rank] += piece.numel()
        arriving = data.new_empty(sum(counts))
        dist.all_to_all_single(arriving, data, [*from_ranks.values()], [*to_ranks.values()], group=self.on_device)
        received = dict(zip(order, arriving.split(counts), strict=True))
        return [received[index].view(shape) for index, (_, shape) in enumerate(wanted)]


@contextmanager
def _accumulating(chunk: DistributedDataParallel) -> Iterator[None]:
    """Gradients are added up inside the block, and none is taken for the last one; unlike DDP's `no_sync`, also within that."""
    groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    before = [group.is_last_microbatch for group in groups]
    for group in groups:
        group.is_last_microbatch = False
    try:
        yield
    finally:
        for group, last in zip(groups, before, strict=True):
            group.is_last_microbatch = last
