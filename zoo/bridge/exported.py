"""An export that is read, tensor by tensor, and not written."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from zoo.bridge.export import HeldTensors
from zoo.bridge.files.writer import Planned
from zoo.bridge.streams import Job, joined
from zoo.types import JsonObject


class ExportedTensors:
    """Reads tensors under their published names, as `zoo.bridge.SafetensorsFolder` does those of a folder that was written.

    A tensor is made when it is read, together with those that come of the same tensor of zoo's; these are held until another one's
    are asked for. Use as a context manager.

    Attributes:
        config: the config.json that the export would write.
    """

    def __init__(self, held: HeldTensors) -> None:
        """Raises BridgeError for tensors that do not fit, UserError where the source is broken."""
        plan, jobs = held.plan()
        self.config: JsonObject = plan.config
        held.expect(sorted({name for name, _ in jobs}))  # as zoo's names are gone through
        self._source = plan.source
        self._planned_by_name: dict[str, tuple[Job, Planned]] = {
            planned.name: (job, planned) for job in (*(job for _, job in jobs), *plan.copies) for planned in job.planned
        }
        self._made: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """All published names, sorted."""
        return sorted(self._planned_by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._planned_by_name[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is written in."""
        return self._planned_by_name[name][1].dtype

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor. Don't write to them."""
        if name not in self._made:
            self._made.clear()  # their memory goes first
            for hf_name, pieces in self._planned_by_name[name][0].make():
                planned = self._planned_by_name[hf_name][1]
                self._made[hf_name] = joined(pieces, planned.shape, planned.dtype)
        tensor = self._made[name]
        return tensor if (first, last) == (0, None) else tensor[first:last]

    get = read

    def close(self) -> None:
        """Let go of what was made, and of the files of what it came from."""
        self._made.clear()
        if self._source is not None:
            self._source.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
