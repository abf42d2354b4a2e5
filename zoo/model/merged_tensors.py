"""A model's tensors with adapters merged into them, without the model: each is made when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from zoo.bridge import ShardInfo
from zoo.bridge.export_plan import Source
from zoo.bridge.load import fit_shapes
from zoo.bridge.streams import joined, of_expert, to_zoo

type Shape = tuple[int, ...]


class SupportsAddTo(Protocol):
    """An adapter."""

    def add_to(self, tensor: Tensor) -> None:
        """Add its product to a whole weight, in place."""


class MergedTensors:
    """Reads tensors under zoo's names, as `zoo.bridge.streams.Reader` says, out of the weights that adapters belong to."""

    def __init__(
        self,
        base: Source,
        shapes: Mapping[str, Shape],
        adapters: Mapping[str, SupportsAddTo],
        whole: Mapping[str, Tensor],
    ) -> None:
        """`shapes`: of the model's tensors; `adapters`: by the name of the tensor that each is added to; `whole`: trained in the place of the base's."""
        self._base, self._shapes, self._adapters, self._whole = base, shapes, adapters, whole
        parameters = [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
        self._entries = fit_shapes(parameters, base.resolution, base.reader, base.dims, ShardInfo())
        self._dtypes: dict[str, torch.dtype] = {}
        self._last: tuple[str, Tensor] | None = None

    def shape(self, name: str) -> Shape:
        """A tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """fp32, in which adapters are added, or that of the base's tensors where none is."""
        if name in self._adapters or name in self._whole:
            return torch.float32
        if name not in self._dtypes:
            names, base = self._entries[name].all_names(self._base.dims), self._base
            stored = (base.reader.dtype(base.resolution.source[part]) for part in names)
            self._dtypes[name] = reduce(torch.promote_types, stored)
        return self._dtypes[name]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor. Don't write to them."""
        made = name in self._adapters or name in self._whole
        if not made and last is not None and self._entries[name].rule.stacked:  # experts that go through as they are
            entry, base = self._entries[name], self._base
            experts = [of_expert(entry, expert, base.resolution.source, base.reader) for expert in range(first, last)]
            joined_experts = [entry.layout.transform.to_zoo(parts, base.dims) for parts in experts]
            return torch.stack(joined_experts).to(self.dtype(name))
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory goes first
            self._last = name, self._made(name)
        tensor = self._last[1]
        return tensor if (first, last) == (0, None) else tensor[first:last]

    @torch.no_grad()
    def _made(self, name: str) -> Tensor:
        if name in self._whole:
            return self._whole[name].detach().to(self.dtype(name))
        base, shape = self._base, self._shapes[name]
        job = to_zoo(self._entries[name], shape, base.resolution.source, base.reader, base.dims, None)
        ((_, pieces),) = job.make()
        tensor = joined(pieces, shape, self.dtype(name))
        if name in self._adapters:
            self._adapters[name].add_to(tensor)
        return tensor
