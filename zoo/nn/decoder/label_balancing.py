"""The labels of a row, shared out evenly over context-parallel ranks.

Answers stand at the ends of samples, and in zigzag the first rank holds every sample's end: it may compute most of the logits while
others wait. A state travels to the rank whose share it is in: hidden size numbers, where its logits are as many as the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup


class LabelExchange(NamedTuple):
    """States on their way to the ranks that compute their logits.

    group: of context-parallel ranks. sent, received: rows to and from each of them, in the ranks' order.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]

    def __call__(self, states: Tensor) -> Tensor:
        """(sum of sent, hidden) of this rank's tokens -> (sum of received, hidden) of its labels; differentiable. All ranks call it."""
        received: Tensor = all_to_all(self.group, states, self.received, self.sent)
        return received


def balance_labels(counts: list[int], rank: int) -> tuple[list[int], list[int]]:
    """How many labels a rank sends to each rank, and gets from each, where rank r's tokens predict counts[r] of them.

    All labels in the ranks' order are cut into equal parts, a rank more or less: rank r gets the r-th.
    """
    size, total = len(counts), sum(counts)
    cuts = [total * part // size for part in range(size + 1)]
    ends = [sum(counts[:part]) for part in range(size + 1)]

    def common(holder: int, part: int) -> int:
        return max(0, min(ends[holder + 1], cuts[part + 1]) - max(ends[holder], cuts[part]))

    return [common(rank, part) for part in range(size)], [common(holder, rank) for holder in range(size)]
