"""Runs of tokens of a packed row that attend to one another both ways, in a decoder that is causal elsewhere.

Gemma's images are such runs: a token of one sees all before it, and its own image to its end. Runs are known on the host, so
that nothing waits for a device; a run never crosses a segment. Costs: O(T) integer work on the host for each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zoo.packing import index


@dataclasses.dataclass(frozen=True)
class BidirectionalSpans:
    """Runs of one call's packed row; without any, attention is causal.

    Attributes:
        spans: (first token, one past the last) of each run, in the order of the row. Tokens of a padded batch (B, T) count
            row by row, row b beginning at b * T.
    """

    spans: tuple[tuple[int, int], ...] = ()
    _memo: dict[tuple, Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_mask(cls, tokens: Tensor, token_index: Tensor) -> BidirectionalSpans:
        """The runs of True in `tokens`; a run also ends with its segment.

        Args:
            tokens: (R, T) bool on the host.
            token_index: (R, T) int64, each token's index within its segment.
        """
        flat, starts = tokens.flatten(), token_index.flatten() == 0
        before, behind = torch.roll(flat, 1), torch.roll(flat, -1)
        first = flat & (~before | starts)
        last = flat & (~behind | torch.roll(starts, -1))
        ends = (last.nonzero()[:, 0] + 1).tolist()
        return cls(tuple(zip(first.nonzero()[:, 0].tolist(), ends, strict=True)))

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs that have a token in [start, stop)."""
        return (span for span in self.spans if span[0] < stop and span[1] > start)

    def horizon(self, total: int, device: torch.device) -> Tensor:
        """(total,) int64, the last token that each token of the row sees: itself, or the last of its run."""

        def make() -> Tensor:
            last = index.arange(total)
            for start, stop in self.spans:
                last[start:stop] = stop - 1
            return index.cpu_to_device(last, device)

        return self.kept(("horizon", total, device), make)

    def kept(self, name: tuple, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of this call that several layers need, made once."""
        if name not in self._memo:
            self._memo[name] = make()
        return self._memo[name]
