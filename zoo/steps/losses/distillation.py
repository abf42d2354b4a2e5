"""The loss of a student: cross entropy of the labels, mixed with the divergence from a teacher (arXiv 1503.02531)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class DistillationLoss:
    """(1 - weight) * cross entropy + weight * temperature^2 * divergence, of each label.

    Attributes:
        weight: of the divergence, 0 to 1.
        temperature: at which both distributions are compared; its square keeps the gradient's size.
    """

    weight: float
    temperature: float
    names: ClassVar[tuple[str, ...]] = ("ce", "kl")

    def __call__(self, nll: Tensor, divergence: Tensor) -> Tensor:
        """(N,) of negative log likelihoods (N,) and divergences (N,)."""
        return (1 - self.weight) * nll + self.weight * self.temperature**2 * divergence

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log: means over the labels, by their weights."""
        return {name: sums[name] / (count or 1.0) for name in self.names}
