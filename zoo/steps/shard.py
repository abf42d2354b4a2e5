"""The part of a micro-batch that one context-parallel rank holds: tokens, placements of embeddings, labels.

One index, `PackedLayout.cp_index`, cuts everything that has a token axis. All of it on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.inputs import Placement
from zoo.packing import PackedLayout
from zoo.steps.media import RankShare

IGNORE = -100  # label of a token that carries no loss, as in torch.nn.CrossEntropyLoss


@dataclass(frozen=True)
class Parts:
    """A packed micro-batch on the host: rows (R, T') of tokens, R = 1 when packed, B when padded."""

    layout: PackedLayout
    input_ids: Tensor  # (R, T') int64
    labels: Tensor  # (R, T') int64, IGNORE where there is no loss
    positions: Tensor  # (A, R, T')
    padding_mask: Tensor  # (R, T') bool, True on tokens the packer added
    token_index: Tensor  # (R, T') int64 index within the segment, 0 at each start
    segment_ids: Tensor  # (R, T') int64, -1 on padding
    # (R, T') int64 index into the caller's flattened batch, -1 for what the caller doesn't have
    source: Tensor
    placements: Mapping[str, Placement]  # rows counted over the whole micro-batch, seq-major: t * R + r


@dataclass(frozen=True)
class Labels:
    """Tokens of one rank that predict a label.

    rows: (N,) int64 of this rank's flattened (T'/cp * R) states. targets: (N,) int64 tokens that they predict.
    at: (row, column) of each label in `Parts`.
    """

    rows: Tensor
    targets: Tensor
    at: tuple[Tensor, Tensor]


class ContextShard:
    """The tokens that rank `rank` of `size` context-parallel ranks holds of a micro-batch's rows."""

    def __init__(self, parts: Parts, row: PackedLayout, rank: int, size: int) -> None:
        """`row`: the layout of each of the rows, which for a padded batch is one segment."""
        self.parts = parts
        self.row, self.rank, self.size = row, rank, size
        self.index = row.cp_index(rank, size)
        self.local = torch.full(
            (row.total,), -1, dtype=torch.int64
        )  # column of the row -> of this rank, or -1
        self.local[self.index] = torch.arange(len(self.index))

    def take(self, x: Tensor) -> Tensor:
        """(R, T') -> (R, T'/cp)."""
        return x.index_select(1, self.index)

    def positions(self) -> Tensor:
        """(A, R, T'/cp)."""
        return self.row.cp_shard(self.parts.positions, self.rank, self.size, dim=2)

    def placements(
        self, placements: Mapping[str, Placement], shares: Mapping[str, RankShare]
    ) -> dict[str, Placement]:
        """Rows as this rank counts them, of embeddings as they stand once gathered."""
        rows, found = self.parts.input_ids.shape[0], {}
        for name, placement in placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            here = self.local[column]
            keep = here >= 0
            source = placement.source[keep]
            if name in shares:
                source = shares[name].place[source]
            found[name] = Placement(here[keep] * rows + row[keep], source)
        return found

    def labels(self, ahead: int = 1) -> Labels:
        """This rank's tokens that predict the label `ahead` tokens behind them, in their own segment."""
        parts, rows = self.parts, self.parts.labels.shape[0]
        follows = (parts.labels[:, ahead:] != IGNORE) & (parts.token_index[:, ahead:] >= ahead)
        row, column = follows.nonzero(as_tuple=True)
        here = self.local[column]
        keep = here >= 0
        row, column, here = row[keep], column[keep], here[keep]
        label = (row, column + ahead)
        assert bool((parts.segment_ids[label] == parts.segment_ids[row, column]).all()), (
            "a label out of its segment"
        )
        return Labels(here * rows + row, parts.labels[label], label)

    def last_tokens(self) -> Labels:
        """The last token of each segment, where this rank holds it: it predicts a token that is not there yet."""
        parts, rows = self.parts, self.parts.labels.shape[0]
        follows = F.pad(parts.segment_ids, (0, 1), value=-1)[:, 1:]
        row, column = ((parts.segment_ids >= 0) & (follows != parts.segment_ids)).nonzero(as_tuple=True)
        here = self.local[column]
        keep = here >= 0
        row, column, here = row[keep], column[keep], here[keep]
        return Labels(here * rows + row, parts.input_ids[row, column], (row, column))

    def successors(self, depth: int) -> tuple[Tensor, Tensor, dict[str, Placement]]:
        """What stands `depth` tokens behind each token of this rank in its own segment, for multi-token prediction.

        Returns:
            (R, T'/cp) int64 token ids, 0 where there is none; (R, T'/cp) bool, True where there is none; and
            placements of their media, rows counted over the whole micro-batch.
        """
        parts, rows = self.parts, self.parts.input_ids.shape[0]
        there = (parts.token_index >= depth) & ~parts.padding_mask  # as somebody's token t + depth
        there = F.pad(there[:, depth:], (0, depth))
        ids = F.pad(parts.input_ids[:, depth:], (0, depth)).masked_fill(~there, 0)
        placements = {}
        for name, placement in parts.placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            keep = parts.token_index[row, column] >= depth
            flat = (column - depth) * rows + row
            placements[name] = Placement(flat[keep], placement.source[keep])
        return self.take(ids), ~self.take(there), placements
