"""Which of vLLM's engines answers which prompt: ranks that train one replica may hold several engines, or a part of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.parallel.world import TIMEOUT, World
from zoo.rollouts.engine import RolloutPrompt

type Place = tuple[int, int]
"""A prompt's replica, and its place among that replica's."""


@dataclass(frozen=True)
class Asked:
    """What an engine has to know of a prompt."""

    number: int
    row: Row
    input_ids: Tensor  # (L,)


class Sharing:
    """Deals the prompts of replicas out to engines of `tensor_parallel` ranks each, which follow one another, and collects the answers.

    An engine's ranks all answer its prompts. Every rank makes one at the same time, and calls its methods so.
    """

    def __init__(self, world: World, tensor_parallel: int) -> None:
        if world.size % tensor_parallel:
            raise UserError(
                f"rl.vllm.tensor_parallel={tensor_parallel}: {world.size} ranks are no whole number of engines; give a divisor of it"
            )
        self.rank, self.replica = world.rank, world.dp_rank
        replicas: list[int] = [0] * world.size
        dist.all_gather_object(replicas, world.dp_rank)
        self.plan = plan(replicas, tensor_parallel)
        self.engine = world.rank // tensor_parallel
        self._of_engine = _group([engine.ranks for engine in self.plan.engines], self.rank, self.plan.exchange_prompts)
        self._of_replica = _group(self.plan.replicas, self.rank, self.plan.exchange_answers)

    def deal(self, prompts: Sequence[RolloutPrompt]) -> dict[Place, Asked]:
        """The prompts that this rank's engine answers, alike on its ranks, out of those of this rank's replica and of others."""
        engines = self.plan.engines_of(self.replica)
        mine = {
            (self.replica, position): Asked(prompt.number, prompt.row, prompt.sample.input_ids)
            for position, prompt in enumerate(prompts)
            if engines[position % len(engines)] == self.engine
        }
        return _united(mine, self._of_engine)

    def collect[T](self, answers: Mapping[Place, T]) -> list[T]:
        """The answers to this rank's replica, in the order of its prompts, out of those of this rank's engine and of others."""
        mine = {key: answer for key, answer in answers.items() if key[0] == self.replica}
        everything = _united(mine, self._of_replica)
        return [everything[key] for key in sorted(everything)]

    def close(self) -> None:
        """Destroy the groups."""
        for group in (self._of_engine, self._of_replica):
            if group is not None:
                dist.destroy_process_group(group)
        self._of_engine = self._of_replica = None


@dataclass(frozen=True)
class EngineRanks:
    """The ranks of an engine, and the replicas that these train."""

    ranks: tuple[int, ...]
    replicas: frozenset[int]


@dataclass(frozen=True)
class Plan:
    """Engines and replicas of all ranks."""

    engines: tuple[EngineRanks, ...]
    replicas: tuple[tuple[int, ...], ...]  # ranks of each

    @property
    def exchange_prompts(self) -> bool:
        """Whether some engine answers to several replicas."""
        return any(len(engine.replicas) > 1 for engine in self.engines)

    @property
    def exchange_answers(self) -> bool:
        """Whether several engines answer to some replica."""
        return any(len(self.engines_of(replica)) > 1 for replica in range(len(self.replicas)))

    def engines_of(self, replica: int) -> list[int]:
        """Numbers of the engines that answer to a replica."""
        return [number for number, engine in enumerate(self.engines) if replica in engine.replicas]


def plan(replicas: Sequence[int], tensor_parallel: int) -> Plan:
    """Engines and replicas of ranks, of which each trains the replica of a number from 0."""
    firsts = range(0, len(replicas), tensor_parallel)
    engines = tuple(
        EngineRanks(tuple(range(first, first + tensor_parallel)), frozenset(replicas[first : first + tensor_parallel]))
        for first in firsts
    )
    ranks = tuple(
        tuple(rank for rank, number in enumerate(replicas) if number == replica) for replica in range(1 + max(replicas))
    )
    return Plan(engines, ranks)


def _group(groups: Sequence[Sequence[int]], rank: int, wanted: bool) -> dist.ProcessGroup | None:
    """The group that has a rank; None where none is wanted. Every rank makes them all."""
    if not wanted:
        return None
    made = [dist.new_group(list(ranks), TIMEOUT, "gloo") for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def _united[T](mine: dict[Place, T], group: dist.ProcessGroup | None) -> dict[Place, T]:
    """What the ranks of a group have together, in the order of places."""
    if group is None:
        return mine
    everyone: list[dict[Place, T]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group)
    united = {key: value for of_rank in everyone for key, value in of_rank.items()}
    return dict(sorted(united.items()))
