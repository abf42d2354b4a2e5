"""`Memo`: tensors, plans and values that one `PackedLayout` made from its lengths, each made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.packing import runs
from zoo.packing.index import CPU, host_to_device

type Name = str | tuple[Any, ...]


class Memo:
    """Index tensors by name and device, plans of moves on a CPU by name, and what callers keep with the layout."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Name, torch.device], Tensor] = {}
        self.plans: dict[Name, runs.Plan | None] = {}
        self.values: dict[tuple[Name, torch.device], Any] = {}
        self.fixed = False  # whether the tensors are given, and lengths don't say what is in them

    def tensor(self, name: Name, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The named tensor on a device, made once on the host. Callers share it: don't write into it."""
        key = (name, device)
        if key not in self.tensors:
            # A tensor made under inference_mode could never again be saved for a backward pass, and a layout
            # may be shared by an evaluation and a training call.
            with torch.inference_mode(False):
                host = self.tensors.get((name, CPU))
                if host is None:
                    host = self.tensors[name, CPU] = make()
                if device != CPU:
                    self.tensors[key] = host_to_device(host, device)
        return self.tensors[key]

    def plan(self, name: Name, device: torch.device, make: Callable[[], runs.Plan]) -> runs.Plan | None:
        """How tokens move without an index, planned once; None where an index is faster, as it is off the CPU."""
        if device.type != "cpu":
            return None
        if name not in self.plans:
            plan = make()
            self.plans[name] = plan if plan.pays else None
        return self.plans[name]

    def value[T](self, name: Name, device: torch.device, make: Callable[[], T]) -> T:
        """The named value for a device, made once. Callers share it: don't write into its tensors."""
        key = (name, device)
        if key not in self.values:
            with torch.inference_mode(False):  # as above
                self.values[key] = make()
        found: T = self.values[key]
        return found

    def fork(self) -> Memo:
        """A memo that begins with everything made so far and keeps what it makes to itself."""
        other = Memo()
        other.tensors, other.plans, other.values = dict(self.tensors), dict(self.plans), dict(self.values)
        return other
