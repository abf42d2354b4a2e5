"""What packing costs, held against one `torch.index_select` of the same data.

    python -m benchmarks.packing samples=256 longest=1000 cp=8 --json

  samples=64 shortest=50 longest=4000    how many samples, and their lengths in tokens; seed=0
  cp=2,4                                 context-parallel sizes; segments are aligned to 2 * cp
  device=cpu threads=1 repeats=30        where, on how many cores, and how often; medians are shown

The data are what a step packs: int64 ids and labels (B, T0) and positions (3, B, T0). They are packed, sliced for rank
0 of a context-parallel group, and unpacked, on a layout made from the mask. An operation is held against one
index_select of as many elements as it puts out, all of them together against one index_select of all that they put
out. There are two forms: "flat", of a one-dimensional tensor, is the fastest there is and the one to beat; "rows", of
a tensor shaped as the output is and along its tokens (all together: five rows), is what one would write, and several
times slower on a CPU. Layout and indices put out nothing that a step uses, so they have no reference of their own; all
together includes them.

Bytes are those that kernels read and write, counted from the tensors of each call to torch: an index_select of n int64
reads n elements and n indices and writes n, 24 n bytes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import script
from benchmarks.packing_report import Case, Growth, Line, PackingOptions, PackingReport, as_dict, table
from zoo.packing.layout import PackedLayout

GROWTH = (1, 2, 4)  # times the tokens


@dataclass(frozen=True)
class Batch:
    """A padded batch: `mask` (B, T0) bool on the CPU; `ids`, `labels` (B, T0), `positions` (3, B, T0), int64."""

    lengths: list[int]
    mask: Tensor
    ids: Tensor
    labels: Tensor
    positions: Tensor

    @property
    def rows(self) -> list[tuple[str, Tensor, int, int]]:
        """Name, tensor, dimension of the batch, and value of padding."""
        return [("ids", self.ids, 0, 0), ("labels", self.labels, 0, -100), ("positions", self.positions, 1, 0)]


def run(options: PackingOptions) -> PackingReport:
    """Measure every context-parallel size, and how the first one grows with the tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        cases = [measure(options, cp) for cp in options.cp]
        grown = [cases[0], *(measure(options, options.cp[0], times) for times in GROWTH[1:])]
    finally:
        torch.set_num_threads(threads)
    growth = Growth(
        [case.tokens for case in grown], [case.together.ms for case in grown], [case.together.flat_ms for case in grown]
    )
    return PackingReport(options, cases, growth)


def make_batch(options: PackingOptions, times: int = 1) -> Batch:
    """A right-padded batch of random lengths, each `times` as long; the same for the same options."""
    draw = random.Random(options.seed)
    lengths = [times * draw.randint(options.shortest, options.longest) for _ in range(options.samples)]
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(options.seed)

    def rows(*shape: int) -> Tensor:
        return torch.randint(0, 1000, shape, generator=generator).to(options.device)

    two = (options.samples, width)
    return Batch(lengths, mask, rows(*two), rows(*two), rows(3, *two))


def measure(options: PackingOptions, cp: int, times: int = 1) -> Case:
    """The operations for one context-parallel size, on `times` the tokens."""
    batch = make_batch(options, times)
    align = 2 * cp if cp > 1 else 1
    layout = PackedLayout.from_mask(batch.mask, align)
    calls = operations(batch, layout, cp)
    shapes = [call(layout).shape for _, call in calls]
    whole = torch.Size((5, sum(shape.numel() for shape in shapes) // 5))

    def from_lengths() -> PackedLayout:
        return PackedLayout.from_lengths(batch.lengths, align)

    def from_mask() -> PackedLayout:
        return PackedLayout.from_mask(batch.mask, align)

    def work(its: PackedLayout) -> None:
        for _, call in calls:
            call(its)

    def everything() -> None:
        from_lengths()
        work(from_mask())

    lines = [
        _line(options, "layout from lengths", from_lengths, None),
        _line(options, "layout from mask", from_mask, None),
        *(
            _line(options, name, partial(call, layout), shape)
            for (name, call), shape in zip(calls, shapes, strict=True)
        ),
    ]
    together = _line(options, "all together", everything, whole)
    warm = _line(options, "on a layout that has its indices", partial(work, layout), None)
    rest = (warm, *lines[:2])
    indices = Line(
        "indices",
        0,
        max(0.0, together.ms - sum(line.ms for line in rest)),
        0.0,
        0.0,
        together.moved - sum(line.moved for line in rest),
        0,
    )
    lines.insert(2, indices)
    padding = layout.total - layout.real_tokens
    return Case(cp, align, layout.total, padding, batch.mask.shape[1], lines, together)


def _line(options: PackingOptions, name: str, call: Callable[[], object], shape: torch.Size | None) -> Line:
    """Time and traffic of a call that puts out `shape` (None: nothing), and those of its references.

    One after the other, not in turns: each then finds the allocator as its own last call left it.
    """
    flat, rows = _references(options, shape)
    probes = (call, flat, rows)
    moved, flat_moved, _ = [_traffic(probe) for probe in probes]
    ms, flat_ms, rows_ms = [median([_ms(options, probe) for _ in range(options.repeats)]) for probe in probes]
    elements = 0 if shape is None else shape.numel()
    return Line(name, elements, ms, flat_ms, rows_ms, moved, flat_moved)


def _references(
    options: PackingOptions, shape: torch.Size | None
) -> tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]:
    """index_select of so many int64 elements, flat and of rows; nothing for None."""
    if shape is None:
        return lambda: None, lambda: None
    data = torch.ones(shape, dtype=torch.int64, device=options.device)
    index = torch.arange(shape.numel(), device=options.device)
    tokens = torch.arange(shape[-1], device=options.device)
    flat = data.flatten()
    return lambda: flat.index_select(0, index), lambda: data.index_select(len(shape) - 1, tokens)


def operations(batch: Batch, layout: PackedLayout, cp: int) -> list[tuple[str, Callable[[PackedLayout], Tensor]]]:
    """Name and call, on a layout equal to `layout`, of packing, slicing (rank 0 of `cp`) and unpacking."""
    packing, slicing, unpacking = [], [], []
    for name, x, dim, fill in batch.rows:
        row = layout.pack(x, fill, dim)
        packing.append((f"pack {name}", methodcaller("pack", x, fill, dim)))
        slicing.append((f"slice {name}", methodcaller("cp_shard", row, 0, cp, dim + 1)))
        unpacking.append((f"unpack {name}", methodcaller("unpack", row, None, fill, dim)))
    return [*packing, *(slicing if cp > 1 else []), *unpacking]


def _traffic(call: Callable[[], object]) -> int:
    """Bytes that a call moves; the call also warms caches."""
    with Traffic() as traffic:
        call()
    return traffic.moved


def _ms(options: PackingOptions, call: Callable[[], object]) -> float:
    """Milliseconds of one call: on one core those of the core, so that other programs' do not count."""
    on_device = options.device != "cpu"
    clock = time.perf_counter if on_device or options.threads > 1 else time.thread_time
    if on_device:
        torch.accelerator.synchronize()
    start = clock()
    kept = call()
    if on_device:
        torch.accelerator.synchronize()
    end = clock()
    del kept
    return (end - start) * 1e3


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels read and write: `moved`. Views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.moved += _bytes(func, args, out)
        return out


def _bytes(func: Any, args: Any, out: Any) -> int:
    """What one kernel reads and writes: its inputs and outputs, but for those that touch a part of them."""
    aten = torch.ops.aten
    inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    written = sum(x.nbytes for x in outputs)
    if func.overloadpacket in (aten.index_select, aten.gather):
        return 2 * written + inputs[1].nbytes
    if func.overloadpacket in (aten.scatter_, aten.index_copy_):
        return 2 * inputs[2].nbytes + inputs[1].nbytes
    if func.overloadpacket is aten.index_fill_:
        x, index = inputs[:2]
        return index.nbytes + x.nbytes // x.shape[args[1]] * index.numel()
    if func.overloadpacket is aten.index_put_:
        return sum(x.nbytes for x in inputs[1:]) + inputs[-1].nbytes
    if func.overloadpacket in (aten.new_full, aten.new_empty, aten.full_like, aten.empty_like):
        return written
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    if not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in storages for x in outputs):
        return 0  # a view, or nothing at all
    return written + sum(x.nbytes for x in inputs)


if __name__ == "__main__":
    sys.exit(script.main(__doc__, PackingOptions, run, table, as_dict))
