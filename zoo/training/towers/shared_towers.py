"""`SharedTowers`: ranks that wait for one another share the work of their towers (parallel.towers=shared).

Ranks that exchange tokens of experts do so in each layer of each micro-batch, and the stages of a pipeline wait for the first one, where towers
stand. Here the items of what a group of ranks trains on at the same time, a unit, are dealt by their cost: a micro-batch of each replica, or, in a
pipeline, whole steps of these, as the first stage begins a micro-batch before the last one has ended another.

1. `plan`, once a step on the host, while the device works on the step before: ranks gather the sizes of items, and deal alike.
2. Before a unit: items that leave their replica are exchanged, each rank encodes its own, and one exchange brings embeddings, with
   deepstack's features, to the ranks that read them: those of the first stage. There they are leaves of the micro-batches' graphs.
3. Behind its backward passes: one exchange brings the leaves' gradients back, and towers have their backward pass.

So as many activations of towers are in memory as without, or a stage's part of a step's. A rank's gradient is that of the items it encoded. It is
summed over the stages of a pipeline (`zoo.training.towers.pipelined_towers`), data and context parallel ranks, and is a mean over tensor parallel ones,
for which it is scaled up (see `zoo.nn.towers.gather`).
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
from zoo.model.lora import Adapters
from zoo.nn.multimodal import MultimodalModel
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import TIMEOUT, World
from zoo.planner.sample_costs import train_factors
from zoo.steps.media import for_towers
from zoo.steps.packed_step import Prepared
from zoo.training.towers.dealt_media import Item, dealt_items, streams_of
from zoo.training.towers.pipelined_towers import PipelinedTowers
from zoo.training.towers.tower_copy import TowerFacts

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


@dataclass
class Encoding:
    """What a rank knows of the media of a unit, from their encoding to their backward pass."""

    items: Sequence[Item]  # of all ranks of the group
    made: list[tuple[Tensor, list[Item]]]  # of each tower, with its graph: (N, W), and the items that it is of
    # By micro-batch and tower, the items of this rank's own micro-batches, in the order of their embeddings.
    read: Mapping[tuple[int, str], list[Item]]
    leaves: dict[tuple[int, str], Tensor]  # (N, W) of these

    def leaves_of(self, batch: int) -> dict[str, Tensor]:
        """By tower, what a micro-batch's model reads."""
        return {tower: leaf for (of_batch, tower), leaf in self.leaves.items() if of_batch == batch}


class SharedTowers:
    """The towers of a model in training. Each rank makes one, and calls its methods in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        assembly: Assembly,
        wrapped: Sequence[DistributedDataParallel],
        world: World,
        adapters: Adapters | None,
    ) -> None:
        """`wrapped`: the model, whose schedule has the last unit's towers run their backward pass when it finalizes gradients."""
        self.world, self.chunk = world, wrapped[0]
        self.step = build_step(assembly, recipe, world, encodes_media=False)
        self._join_ranks(recipe)
        self.model = next(part for part in self.chunk.modules() if isinstance(part, MultimodalModel))
        self.pipelined: PipelinedTowers | None = None
        if world.pp_size > 1:
            facts = self._gathered(None if world.pp_rank else TowerFacts.from_model(self.model, adapters))[0]
            if world.pp_rank:
                assert facts is not None
                self.model = facts.copied(assembly, recipe, world)
            self.pipelined = PipelinedTowers(self.model, world)
        names, layers = self.model.tower_names(), self.model.deepstack_layers
        self.trained = [name for name in names if isinstance(self.model.zero_of(name), Tensor)]
        self.widths = {name: self.model.config.hidden_size * (1 + layers.get(name, 0)) for name in names}
        costs, factors = assembly.config.tower_costs(), train_factors(assembly.config, recipe)
        self.costs: dict[str, Callable[[float], float]] = {
            name: lambda rows, name=name: factors[name] * costs[name].flops(rows)  # type: ignore[misc]
            for name in names
        }
        self.encoding: Encoding | None = None
        finalize = self.chunk.config.finalize_model_grads_func
        assert finalize is not None  # `wrap_ddp` sets it

        def finalize_behind_towers(*args: Any, **options: Any) -> Any:
            self._finish()
            return finalize(*args, **options)

        self.chunk.config.finalize_model_grads_func = finalize_behind_towers

    def _join_ranks(self, recipe: Recipe) -> None:
        """Make the groups of ranks that share, and note who is where."""
        parallel, world = recipe.parallel, self.world
        # Whole replicas, and whole groups that share experts; ranks of a stage have numbers next to one another.
        size, stage = lcm(parallel.tp * parallel.cp, parallel.etp * parallel.ep), world.size // world.pp_size
        blocks = [
            [start + first + rank for start in range(0, world.size, stage) for rank in range(size)]
            for first in range(0, stage, size)
        ]
        groups = [(ranks, dist.new_group(ranks, TIMEOUT, "gloo"), dist.new_group(ranks, TIMEOUT)) for ranks in blocks]
        self.ranks, self.on_host, self.on_device = next(group for group in groups if world.rank in group[0])
        places = dict(
            zip(self.ranks, self._gathered((world.dp_rank, world.pp_rank, world.cp_rank, world.tp_rank)), strict=True)
        )
        self.homes: dict[int, list[int]] = {}  # the ranks of each replica
        for rank in sorted(self.ranks, key=places.__getitem__):
            self.homes.setdefault(places[rank][0], []).append(rank)
        self.seats = {rank: home.index(rank) for home in self.homes.values() for rank in home}
        # The first stage reads what towers make of media.
        self.readers = {
            replica: [rank for rank in home if places[rank][1] == 0] for replica, home in self.homes.items()
        }
        # Tensor-parallel ranks have the same gradients of what they read, so only the first of them sends these back.
        self.payers = {
            replica: [rank for rank in home if places[rank][3] == 0] for replica, home in self.readers.items()
        }

    def _gathered[T](self, value: T) -> list[T]:
        """The value of each rank of the group."""
        values = [value] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.on_host)
        return values

    def plan(self, batches: Sequence[MicroBatch]) -> list[list[Item]]:
        """The items of each unit of a step, of all ranks of the group, and who encodes them; `batches` are this rank's micro-batches."""
        every = self._gathered([streams_of(self.step, batch.media) for batch in batches])
        by_rank = dict(zip(self.ranks, every, strict=True))
        numbers = range(len(batches))
        units = [numbers] if self.pipelined else [range(number, number + 1) for number in numbers]
        return [
            dealt_items(
                [
                    (number, replica, by_rank[home[0]][number])
                    for number in unit
                    for replica, home in self.homes.items()
                ],
                self.homes,
                self.costs,
            )
            for unit in units
        ]

    def prepared(
        self, plan: Sequence[Sequence[Item]], batches: Sequence[MicroBatch], ready: Iterable[MicroBatch | Prepared]
    ) -> Iterable[Prepared]:
        """A step's micro-batches with what their models read of their media.

        In a pipeline all media are encoded now, and the result is a list, which each of a stage's chunks goes through. Otherwise those of a
        micro-batch are encoded when the schedule asks for it.

        Args:
            plan: `plan` of `batches`.
            ready: the same, or what `self.step` has prepared of them.
        """
        if self.pipelined is None:
            return self._one_by_one(plan, batches, ready)
        settle_all()
        self.pipelined.take_weights()
        self.encoding = self._encode(plan[0], batches)
        return [self._with_leaves(number, known) for number, known in enumerate(ready)]

    def _one_by_one(
        self, plan: Sequence[Sequence[Item]], batches: Sequence[MicroBatch], ready: Iterable[MicroBatch | Prepared]
    ) -> Iterator[Prepared]:
        for number, (items, known) in enumerate(zip(plan, ready, strict=True)):
            self._backward()
            settle_all()
            self.encoding = self._encode(items, batches)
            yield self._with_leaves(number, known)

    def _with_leaves(self, number: int, known: MicroBatch | Prepared) -> Prepared:
        """A micro-batch with what the encoding has for it."""
        assert self.encoding is not None
        known = known if isinstance(known, Prepared) else Prepared(*self.step.prepare(known))
        return replace(known, inputs=replace(known.inputs, encoded=self.encoding.leaves_of(number)))

    def _encode(self, items: Sequence[Item], batches: Sequence[MicroBatch]) -> Encoding:
        """Encode this rank's items, and bring embeddings to the ranks that read them."""
        rows = self._rows(items, batches)
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
        read: dict[tuple[int, str], list[Item]] = {}
        for item in items:
            if self.world.rank in self.readers[item.replica]:
                read.setdefault((item.batch, item.stream.tower), []).append(item)
        return Encoding(items, made, read, self._leaves(items, made, read))

    def _rows(self, items: Sequence[Item], batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
        """Rows of media by number of the item, on the device, of those that this rank encodes: its replica's, and what others send."""
        world = self.world
        senders = {item.number: self._sender(item) for item in items}
        rows: dict[int, Tensor] = {}
        for item in items:
            sender = senders[item.number]
            if item.replica == world.dp_rank and world.rank == (item.owner if sender is None else sender):
                span = batches[item.batch].media[item.stream.data][item.first : item.first + item.rows]
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
        self,
        items: Sequence[Item],
        made: Sequence[tuple[Tensor, list[Item]]],
        read: Mapping[tuple[int, str], list[Item]],
    ) -> dict[tuple[int, str], Tensor]:
        """Bring what towers made to the ranks that read it; by micro-batch and tower, (N, W) of this rank's."""
        if not items:
            return {}
        pieces = {
            item.number: piece
            for output, of_tower in made
            for item, piece in zip(of_tower, output.detach().split([item.outputs for item in of_tower]), strict=True)
        }
        sent = [
            (rank, pieces[item.number])
            for item in items
            if item.number in pieces
            for rank in self.readers[item.replica]
        ]
        wanted = [item for of_tower in read.values() for item in of_tower]
        shapes = [(item.owner, (item.outputs, self.widths[item.stream.tower])) for item in wanted]
        received = iter(self._exchange(sent, shapes, self.model.config.params_dtype))
        leaves: dict[tuple[int, str], Tensor] = {}
        for (batch, tower), of_tower in read.items():
            joined = torch.cat([next(received) for _ in of_tower])
            leaves[batch, tower] = joined.requires_grad_(tower in self.trained)
        return leaves

    def _finish(self) -> None:
        """The backward pass of a step's last unit, after which no tower gets gradients: their reductions may begin."""
        if self.encoding is None:
            return
        self._backward()
        if self.pipelined is not None:
            self.pipelined.give_gradients()
        if (
            self.trained and self.world.pp_rank == 0
        ):  # on ranks without an item, too, so that reductions begin in the same order on all
            torch.as_tensor(sum(self.model.zero_of(name) for name in self.trained)).backward()

    def _backward(self) -> None:
        """Bring back the gradients of what towers made of the unit that has had its backward passes, and run theirs."""
        encoding, self.encoding = self.encoding, None
        items = [item for item in encoding.items if item.stream.tower in self.trained] if encoding else []
        if encoding is None or not items:
            return
        sent: list[tuple[int, Tensor]] = []
        for (batch, tower), of_tower in encoding.read.items():
            if tower in self.trained and self.world.rank in self.payers[self.world.dp_rank]:
                leaf = encoding.leaves[batch, tower]
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
