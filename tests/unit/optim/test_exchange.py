"""Pieces of matrices reach one owner and come back, whatever ranges ranks hold; ranks are threads here."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.model.matrices import Matrices
from zoo.nn.muon import orthogonalized
from zoo.optim import exchange
from zoo.optim.exchange import Exchange, Parameter


class Threads:
    """Ranks of one group; each all-to-all waits for all of them."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=20)
        self.sent: list[Any] = [None] * size
        self.bytes = 0

    def all_to_all(self, out: Any, values: Any, incoming: Sequence[int], sizes: Sequence[int], group: Any) -> None:
        self.sent[group.rank()] = values.split(list(sizes))
        self.bytes += sum(size for rank, size in enumerate(sizes) if rank != group.rank())
        self.barrier.wait()
        received = [self.sent[rank][group.rank()] for rank in range(self.size)]
        assert [len(one) for one in received] == list(incoming)
        out.copy_(torch.cat(received))
        self.barrier.wait()


# Three parameters on two ranks of an axis: rows of two matrices that alternate, columns of a stack of two, and rows of unequal number.
PARAMETERS = [
    Matrices("tp", 0, 6, ((((0, 2), (4, 6)), ((2, 4),)),) * 2),
    Matrices("tp", 1, 4, ((((0, 5),), ((5, 10),)),) * 2),
    Matrices("tp", 0, 3, ((((0, 4),), ((4, 6),)), (((0, 2),), ((2, 6),)))),
]
NUMEL = (36, 40, 18)


def parts(values: torch.Tensor, matrices: Matrices, rank: int) -> list[torch.Tensor]:
    """A rank's part of each matrix in its (flat) parameter; views."""
    rows = values.view(-1, matrices.columns)
    return [torch.cat([rows[first:end] for first, end in runs]) for runs in matrices.rows[rank]]


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("at_once", [2**26, 40])
def test_what_comes_back_is_the_whole_matrix_orthogonalised(
    replicas: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * replicas
    threads = Threads(size)
    monkeypatch.setattr(exchange, "AT_ONCE", at_once)
    monkeypatch.setattr(exchange.dist, "all_to_all_single", threads.all_to_all)
    ends = [[n * (i + 1) // replicas - (3 if i + 1 < replicas else 0) for i in range(replicas)] for n in NUMEL]
    parameters = [
        Parameter(one, n, tuple(zip([0, *end[:-1]], end, strict=True)))
        for one, n, end in zip(PARAMETERS, NUMEL, ends, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(n, generator=generator) for n in NUMEL] for _ in range(2)]
    found = [[torch.full((n,), torch.nan) for n in NUMEL] for _ in range(2)]
    places = [(cut, replica) for replica in range(replicas) for cut in range(2)]
    owners: list[set[Any]] = [set() for _ in range(size)]

    def run(rank: int) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
        mine = Exchange(group, places, parameters, torch.empty(0))
        cut, replica = places[rank]
        for batch in mine.batches:
            owners[rank] |= {(one.index, one.shape, one.owner) for one in batch}
            held = {}
            for index, parameter in enumerate(parameters):
                first, end = parameter.ranges[replica]
                held[index] = first, values[cut][index][first:end]
            for one in mine.orthogonalize(batch, held):
                found[cut][one.index][one.first : one.end] = one.values

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert all(one == owners[0] for one in owners)
    for index, matrices in enumerate(PARAMETERS):
        of_ranks = [parts(values[cut][index], matrices, cut) for cut in range(2)]
        got = [parts(found[cut][index], matrices, cut) for cut in range(2)]
        for number, shape in enumerate(matrices.shapes()):
            whole = torch.cat([of_ranks[cut][number] for cut in range(2)], dim=matrices.dim)
            assert whole.shape == shape
            wanted = orthogonalized(whole[None])[0]
            joined = torch.cat([got[cut][number] for cut in range(2)], dim=matrices.dim)
            assert torch.allclose(joined, wanted, atol=1e-5)
    assert threads.bytes <= 2 * 4 * 2 * sum(NUMEL)  # each element there and back at most


def test_matrices_that_a_rank_holds_whole_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each rank works on its own ones."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    experts = Matrices(None, 0, 4, ((((0, 5),), ((5, 10),)),))
    plan = Exchange(group, [(0, 0), (0, 1)], [Parameter(experts, 40, ((0, 20), (20, 40)))], torch.empty(0))
    assert [one.owner for one in plan.batches[0]] == [0, 1]
    travelled = []
    monkeypatch.setattr(
        exchange.dist,
        "all_to_all_single",
        lambda out, values, incoming, sizes, group: (travelled.append(sizes[1]), out.copy_(values)),
    )
    elements = torch.randn(20, generator=torch.Generator().manual_seed(0))
    (one,) = plan.orthogonalize(plan.batches[0], {0: (0, elements)})
    assert torch.allclose(one.values.view(5, 4), orthogonalized(elements.view(1, 5, 4))[0], atol=1e-6)
    assert travelled == [0, 0]
