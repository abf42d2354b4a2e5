"""Whole tensors from one layout to another, a piece at a time: what a conversion and an export write.

A `Job` is one zoo tensor: what is written of it, and a function that makes it, expert by expert, or in chunks of rows
where it is copied as it is. So memory holds one tensor (of one expert), whatever the checkpoint's size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.bridge.files.writer import Planned, ShardWriter
from zoo.bridge.mapping.table import Entry
from zoo.bridge.mapping.transforms import Copy, Dims, GateUp, Rows
from zoo.bridge.native import PASS_THROUGH

CHUNK = 16 * 2**20  # bytes of a piece of a tensor that is copied
BELOW = (GateUp, Rows)  # transforms that lay tensors one below the other: nothing has to be held to join them
AHEAD = 2  # pieces made before they are written

type Made = Iterator[tuple[str, Iterable[Tensor]]]
"""Name and pieces of each planned tensor, in order."""


class Reader(Protocol):
    """Tensors by name: a `SafetensorsFolder`, or a run's checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor: ...


class Folder(Reader, Protocol):
    """The same, with all their names: a `SafetensorsFolder`, or what an export would write."""

    def names(self) -> list[str]: ...
    def get(self, name: str, first: int = 0, last: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Job:
    """What is written of one tensor; `make` gives the planned tensors in their order, all of one dtype."""

    planned: tuple[Planned, ...]
    make: Callable[[], Made]


def run(jobs: Iterable[Job], writer: ShardWriter, wrote: Callable[[int], None] = lambda count: None) -> None:
    """Make and write all jobs; `wrote` hears of the bytes of each piece.

    The writer must plan the tensors of `by_width(jobs)`. A thread makes pieces, up to AHEAD before they are
    written, so that reading and writing overlap.
    """
    jobs = list(jobs)
    dtypes = {planned.name: planned.dtype for job in jobs for planned in job.planned}
    # Cast and turned here, beside the writing.
    tensors = (
        (name, piece.to("cpu", dtypes[name]).contiguous())
        for job in jobs
        for name, pieces in job.make()
        for piece in pieces
    )

    def counted(pieces: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
        for _, piece in pieces:
            yield piece
            wrote(piece.nbytes)

    with closing(_ahead(tensors)) as pieces:
        for name, of_tensor in groupby(pieces, itemgetter(0)):
            writer.write(name, counted(of_tensor))


def _ahead[T](items: Iterator[T]) -> Generator[T]:
    """The items, up to AHEAD of which a thread makes before they are asked for.

    On one core: threads of torch's own, which wait in a loop, would hold up the others (84 s instead of 17 for 512 experts on two cores).
    """
    pool = ThreadPoolExecutor(1, "zoo-convert", torch.set_num_threads, (1,))
    try:
        waiting = deque(pool.submit(next, items, None) for _ in range(AHEAD))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def joined(pieces: Iterable[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of that shape, in that dtype, whose pieces these are, one behind the other."""
    tensor = torch.empty(shape, dtype=dtype)
    flat, offset = tensor.view(-1), 0
    for piece in pieces:
        flat[offset : offset + piece.numel()].copy_(piece.reshape(-1))
        offset += piece.numel()
    return tensor


def by_width(jobs: Iterable[Job]) -> list[Job]:
    """The jobs as a ShardWriter wants their tensors: those of wide dtypes first."""
    return sorted(jobs, key=lambda job: -job.planned[0].width)


def to_zoo(
    entry: Entry, shape: tuple[int, ...], source: Mapping[str, str], reader: SafetensorsFolder, dims: Dims,
    dtype: torch.dtype | None,
) -> Job:  # fmt: skip
    """A zoo tensor of that full shape out of the tensors of its entry; `dtype` None keeps theirs."""
    names = [source[name] for name in entry.all_names(dims)]
    stored = dtype or reduce(torch.promote_types, (reader.dtype(name) for name in names))
    transform, stacked = entry.layout.transform, entry.rule.stacked

    def pieces() -> Iterator[Tensor]:
        if isinstance(transform, Copy) and not entry.layout.per_expert:
            yield from rows(reader, names[0])
        elif isinstance(transform, BELOW) and (entry.layout.per_expert or not stacked):
            for name in names:
                yield from rows(reader, name)
        elif not stacked:
            yield transform.to_zoo([reader.read(name) for name in names], dims)
        else:
            for expert in range(shape[0]):
                yield transform.to_zoo(of_expert(entry, expert, source, reader), dims)

    return Job((Planned(entry.zoo, shape, stored),), lambda: iter([(entry.zoo, pieces())]))


def of_expert(entry: Entry, expert: int, source: Mapping[str, str], reader: Reader) -> list[Tensor]:
    """The tensors of one expert, of a file that has them one by one or stacked."""
    names = [source[name] for name in entry.hf_names(expert)]
    if entry.layout.per_expert:
        return [reader.read(name) for name in names]
    return [reader.read(name, expert, expert + 1)[0] for name in names]


def to_hf(entry: Entry, zoo_name: str, reader: Reader, dims: Dims, dtype_of: Callable[[str], torch.dtype]) -> list[Job]:
    """The tensors of an entry out of the zoo tensor that the reader has under `zoo_name`: a job for each width of their dtypes.

    `dtype_of` says which dtype each published tensor is written in.
    """
    shape = reader.shape(zoo_name)
    transform, names = entry.layout.transform, entry.all_names(dims)
    shapes = entry.hf_shapes(shape, dims)

    def part_of_each(which: int) -> Iterator[Tensor]:
        for expert in range(shape[0]):
            (expert_weight,) = reader.read(zoo_name, expert, expert + 1)
            yield transform.to_hf(expert_weight, dims)[which]

    def make() -> Made:
        if isinstance(transform, Copy) and not entry.layout.per_expert:
            yield names[0], rows(reader, zoo_name)
        elif isinstance(transform, BELOW) and not entry.rule.stacked:
            first = 0
            for name in names:
                last = first + shapes[name][0]
                yield name, rows(reader, zoo_name, first, last)
                first = last
        elif not entry.rule.stacked:
            for name, part in zip(names, transform.to_hf(reader.read(zoo_name), dims), strict=True):
                yield name, [part]
        elif entry.layout.per_expert:
            for expert in range(shape[0]):
                (expert_weight,) = reader.read(zoo_name, expert, expert + 1)
                for name, part in zip(entry.hf_names(expert), transform.to_hf(expert_weight, dims), strict=True):
                    yield name, [part]
        else:
            for which, name in enumerate(names):
                yield name, part_of_each(which)

    by_width: dict[int, dict[str, Planned]] = {}
    for name in names:
        planned = Planned(name, shapes[name], dtype_of(name))
        by_width.setdefault(planned.dtype.itemsize, {})[name] = planned

    def job(wanted: Mapping[str, Planned]) -> Job:
        return Job(tuple(wanted.values()), lambda: ((name, pieces) for name, pieces in make() if name in wanted))

    return [job(wanted) for wanted in by_width.values()]


def copy_job(name: str, reader: Reader, published: str, *, to_zoo: bool) -> Job:
    """A tensor as it is, under its published name or under that of zoo's own weights."""
    target = f"{PASS_THROUGH}{published}" if to_zoo else published
    planned = Planned(target, reader.shape(name), reader.dtype(name))
    return Job((planned,), lambda: iter([(target, rows(reader, name))]))


def rows(reader: Reader, name: str, first: int = 0, last: int | None = None) -> Iterator[Tensor]:
    """Rows `first` to `last` (exclusive) of a tensor, in pieces of about CHUNK bytes."""
    shape = reader.shape(name)
    size = math.prod(shape) * reader.dtype(name).itemsize
    if size <= CHUNK or not shape:
        yield reader.read(name, first, last)
        return
    step, end = max(1, CHUNK * shape[0] // size), shape[0] if last is None else last
    for start in range(first, end, step):
        yield reader.read(name, start, min(start + step, end))
