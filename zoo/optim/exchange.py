"""Matrices that ranks hold in ranges of elements: each is gathered by one of them, orthogonalised, and given back.

Megatron-Core's distributed optimizer cuts a bucket of parameters into one range a data-parallel rank, whatever the borders of
matrices; tensor parallelism cuts matrices before that. One of the ranks that hold a piece of a matrix is its owner. Two
all-to-alls a batch carry pieces to owners and back, so a matrix travels at most once each way, and one that a rank holds whole
doesn't travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.model.matrices import Matrices, Spans
from zoo.nn.muon import newton_schulz_flops, orthogonalized

AT_ONCE = 2**26  # elements of parameters that are exchanged, and of matrices that are orthogonalised, in one go


@dataclass(frozen=True)
class Parameter:
    """A parameter's matrices, and the range of its elements that each data-parallel rank holds."""

    matrices: Matrices
    numel: int  # on this rank, before the distributed optimizer cuts it
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Matrix:
    """One matrix of the parameter number `index`.

    Attributes:
        pieces: by rank of the group: ranges of elements of that rank's parameter.
        parts: by rank of the axis that cuts the matrix: the group's ranks that share its part, in the order of elements.
        owner: the group's rank that orthogonalises it.
    """

    index: int
    shape: tuple[int, int]
    dim: Literal[0, 1]
    pieces: tuple[Spans, ...]
    parts: tuple[tuple[int, ...], ...]
    owner: int

    def held(self, rank: int) -> int:
        """Elements that a rank of the group holds."""
        return sum(end - first for first, end in self.pieces[rank])


@dataclass(frozen=True)
class Values:
    """Elements `first` to `end` of the parameter number `index`, orthogonalised: (N,) fp32."""

    index: int
    first: int
    end: int
    shape: tuple[int, int]  # of the matrix
    values: Tensor


class Exchange:
    """The matrices that one process group shares."""

    def __init__(
        self, group: dist.ProcessGroup, places: Sequence[tuple[int, int]], parameters: Sequence[Parameter], like: Tensor
    ) -> None:
        """Plan who owns what. Every rank of the group plans the same.

        Args:
            group: a process group; ranks of it may hold nothing.
            places: by rank of the group: its rank of the axis that cuts matrices (0 where none does), its data-parallel rank.
            parameters: the same on every rank of the group.
            like: has the device, and the dtype that matrices are sent and orthogonalised in.
        """
        self._sent_dtype, self._device = like.dtype, like.device
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._places = places
        self._load = [0.0] * self.size
        self.batches: list[list[Matrix]] = []
        elements = AT_ONCE
        for index, parameter in enumerate(parameters):
            if elements + parameter.numel > AT_ONCE:
                self.batches.append([])
                elements = 0
            elements += parameter.numel
            self.batches[-1] += self._matrices(index, parameter)

    def _matrices(self, index: int, parameter: Parameter) -> Iterator[Matrix]:
        layout, columns = parameter.matrices, parameter.matrices.columns
        for number, shape in enumerate(layout.shapes()):
            runs = [tuple((first * columns, end * columns) for first, end in rows[number]) for rows in layout.rows]
            pieces = tuple(_within(runs[cut], parameter.ranges[replica]) for cut, replica in self._places)
            parts = tuple(
                tuple(
                    sorted(
                        (r for r in range(self.size) if self._places[r][0] == cut),
                        key=lambda rank: self._places[rank][1],
                    )
                )
                for cut in range(len(runs))
            )
            holders = [rank for rank in range(self.size) if pieces[rank]]
            owner = min(holders, key=lambda rank: (self._load[rank], rank))
            self._load[owner] += newton_schulz_flops(*shape)
            yield Matrix(index, shape, layout.dim, pieces, parts, owner)

    def orthogonalize(self, batch: Sequence[Matrix], held: Mapping[int, tuple[int, Tensor]]) -> list[Values]:
        """This rank's pieces of a batch of matrices, orthogonalised. Every rank of the group calls it.

        Args:
            held: by index of a parameter: the first element that this rank holds, and its elements (N,).
        """
        away = [
            (matrix, first, end)
            for owner in range(self.size)
            for matrix in batch
            if matrix.owner == owner
            for first, end in matrix.pieces[self.rank]
        ]
        owned = [matrix for matrix in batch if matrix.owner == self.rank]
        sizes = [0] * self.size
        for matrix, first, end in away:
            sizes[matrix.owner] += end - first
        incoming = [sum(matrix.held(rank) for matrix in owned) for rank in range(self.size)]
        pieces = []
        for matrix, first, end in away:
            start, elements = held[matrix.index]
            pieces.append(elements[first - start : end - start])
        sent = torch.cat(pieces) if pieces else torch.empty(0, device=self._device)
        received = self._swap(sent.to(self._sent_dtype), sizes, incoming)
        self._orthogonalize(owned, received, incoming)
        returned = self._swap(received, incoming, sizes).float()
        values = returned.split([end - first for _, first, end in away])
        return [
            Values(matrix.index, first, end, matrix.shape, value)
            for (matrix, first, end), value in zip(away, values, strict=True)
        ]

    def _swap(self, values: Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> Tensor:
        """All-to-all of flat `values`, `sizes` to the group's ranks and `incoming` from them."""
        if self.size == 1:
            return values
        width = values.element_size()  # bytes: gloo does not send every dtype
        received = torch.empty(sum(incoming), dtype=values.dtype, device=values.device)
        dist.all_to_all_single(
            received.view(torch.uint8),
            values.view(torch.uint8),
            [count * width for count in incoming],
            [count * width for count in sizes],
            group=self.group,
        )
        return received

    def _orthogonalize(self, owned: Sequence[Matrix], received: Tensor, incoming: Sequence[int]) -> None:
        """Replace the pieces of this rank's matrices in `received`, which come rank by rank."""
        starts = [sum(incoming[:rank]) for rank in range(self.size)]
        alike: dict[tuple[int, int], list[tuple[Matrix, list[Tensor]]]] = {}
        for matrix in owned:
            views = []
            for rank in range(self.size):
                count = matrix.held(rank)
                views.append(received[starts[rank] : starts[rank] + count])
                starts[rank] += count
            alike.setdefault(matrix.shape, []).append((matrix, views))
        for shape, of_shape in alike.items():
            several = max(1, AT_ONCE // (shape[0] * shape[1]))
            for first in range(0, len(of_shape), several):
                some = of_shape[first : first + several]
                orthogonal = orthogonalized(torch.stack([_joined(matrix, views) for matrix, views in some]))
                pieces = [
                    part
                    for (matrix, views), update in zip(some, orthogonal, strict=True)
                    for part in _parts(matrix, views, update)
                ]
                held = [views[rank] for matrix, views in some for ranks in matrix.parts for rank in ranks]
                torch._foreach_copy_(held, pieces)


def _within(runs: Spans, limits: tuple[int, int]) -> Spans:
    overlaps = ((max(first, limits[0]), min(end, limits[1])) for first, end in runs)
    return tuple((first, end) for first, end in overlaps if first < end)


def _joined(matrix: Matrix, views: Sequence[Tensor]) -> Tensor:
    """The whole matrix of all ranks' pieces; its rows are in the order of ranks, which is as good as any."""
    columns = matrix.shape[1] if matrix.dim == 0 else matrix.shape[1] // len(matrix.parts)
    parts = [torch.cat([views[rank] for rank in ranks]).view(-1, columns) for ranks in matrix.parts]
    return torch.cat(parts, dim=matrix.dim)


def _parts(matrix: Matrix, views: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
    """The pieces of a matrix, rank by rank of `matrix.parts`: the inverse of `_joined`."""
    columns = matrix.shape[1] if matrix.dim == 0 else matrix.shape[1] // len(matrix.parts)
    sizes = [[views[rank].numel() for rank in ranks] for ranks in matrix.parts]
    widths = [sum(counts) // columns if matrix.dim == 0 else columns for counts in sizes]
    cut = whole.split(widths, dim=matrix.dim)
    return [piece for part, counts in zip(cut, sizes, strict=True) for piece in part.reshape(-1).split(counts)]
