"""Which weights Muon updates: matrices of decoder and towers, each as the published checkpoint has it.

AdamW updates the rest: embeddings, heads, routers, norms, biases, convolutions. A fused parameter holds several matrices
(queries, keys, values; gate and up; each expert's), and each is orthogonalised by itself. Heads stay together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from zoo.bridge import Bridge, Dims
from zoo.bridge.mapping.transforms import Copy, GateUp, Transform
from zoo.bridge.parallel import Axis, ShardInfo, cut, full_shape, shard_axis

type Spans = tuple[tuple[int, int], ...]
"""(first, end) of each."""

_NO_MATRIX = re.compile(r"embed|(^|\.)(output_layer|score|heads)\.|\.router\.")  # embeddings of patches and places too


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter, by its global name: a matrix, or experts' matrices in a stack, of a hidden layer."""
    if _NO_MATRIX.search(name):
        return False
    if ".experts." in name:
        return parameter.ndim == 3
    return parameter.ndim == 2 and min(parameter.shape) > 1


@dataclass(frozen=True)
class Matrices:
    """The matrices within one parameter, and how ranks cut each of them."""

    axis: Axis | None  # the group whose ranks cut them, None where every rank has them whole
    dim: Literal[0, 1]  # what is cut: 0 for rows, 1 for columns
    columns: int  # of this rank's parameter, whose experts stand one below the other
    rows: tuple[tuple[Spans, ...], ...]  # by rank of the group, by matrix: the rows of that rank's parameter

    def shapes(self) -> Iterator[tuple[int, int]]:
        """(rows, columns) of each matrix, whole."""
        for of_ranks in zip(*self.rows, strict=True):
            heights = [sum(end - first for first, end in spans) for spans in of_ranks]
            if self.dim == 1:
                yield heights[0], self.columns * len(heights)
            else:
                yield sum(heights), self.columns


def matrices_of(name: str, parameter: Tensor, bridge: Bridge, dims: Dims, info: ShardInfo) -> Matrices:
    """The matrices of a parameter for which `is_matrix` holds, by the bridge's rule for it.

    Args:
        info: this rank's coordinates; `parameter` is its part.
    """
    entry = bridge.publish([name])[name]
    rule, shard = entry.rule, entry.rule.shard_for(dims)
    transform: Transform = entry.layout.transform
    if rule.stacked:  # whose files may have gate and up in one tensor, or transposed ones
        transform = GateUp() if shard == "expert1" else Copy()
    axis = shard_axis(shard)
    size = 1 if shard is None else info.on(axis)[1]
    whole = full_shape(parameter.shape, shard, info)
    labels = _matrix_of_row(whole[1 if rule.stacked else 0], transform, dims)
    stack = parameter.shape[0] if rule.stacked else 1
    dim: Literal[0, 1] = 1 if shard in ("tp1", "expert2") else 0
    rows = []
    for rank in range(size):
        of_rank = labels
        if dim == 0 and size > 1:
            that_rank = replace(info, tp_rank=rank) if axis == "tp" else replace(info, etp_rank=rank)
            of_rank = cut(labels.view(-1, 1), shard, that_rank).flatten()
        spans_by_label = _spans(of_rank)
        offsets = [expert * len(of_rank) for expert in range(stack)]
        rows.append(
            tuple(
                tuple((first + offset, end + offset) for first, end in spans)
                for offset in offsets
                for spans in spans_by_label
            )
        )
    return Matrices(axis if size > 1 else None, dim, parameter.shape[-1], tuple(rows))


def _matrix_of_row(rows: int, transform: Transform, dims: Dims) -> Tensor:
    """(rows,): which published tensor each row of a full parameter belongs to."""
    labels = torch.zeros(rows, dtype=torch.int64)
    for number, part in enumerate(transform.to_hf(torch.arange(rows).view(-1, 1), dims)):
        labels[part.flatten()] = number
    return labels


def _spans(labels: Tensor) -> list[Spans]:
    """For each label, from 0 on, the spans of rows that have it."""
    values, counts = torch.unique_consecutive(labels, return_counts=True)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(int(labels.max()) + 1)]
    first = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        spans[value].append((first, first + count))
        first += count
    return [tuple(of_label) for of_label in spans]
