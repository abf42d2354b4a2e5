"""The part of a micro-batch that one context-parallel rank holds: tokens, placements of embeddings, labels.

One index, `PackedLayout.cp_index` or `SampleLevelSplit.index`, cuts everything that has a token axis; labels are balanced over the
ranks, as their logits may take as long as many layers (`zoo.nn.head`). All of it runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.decoder.attention.self_attention import SeqParams
from zoo.nn.head import LabelExchange, balance_labels
from zoo.nn.inputs import Placement
from zoo.packing import PackedLayout
from zoo.packing.spans import BidirectionalSpans
from zoo.steps.media import RankShare
from zoo.steps.sample_level_cp import SampleLevelSplit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    whole: SampleLevelSplit | None = None  # the context-parallel ranks that hold each segment; None: all, chunks of it


def padded_rows(rows: list[Tensor], layout: PackedLayout, align: int, pad_to: int | None) -> list[Tensor]:
    """The tensors of `Parts`, packed (1, T), as right-padded (B, W); W is the longest length, aligned, or `pad_to`."""
    width = pad_to or -(-max(layout.lengths) // align) * align
    plain = layout.without_batch()
    ids, labels, positions, padding, _, segments, source = rows
    return [
        plain.unpack(ids, width),
        plain.unpack(labels, width, fill=IGNORE),
        plain.unpack(positions, width, batch_dim=1),
        plain.unpack(padding, width, fill=True),
        torch.arange(width).expand(layout.num_segments, width),
        plain.unpack(segments, width, fill=-1),
        plain.unpack(source, width, fill=-1),
    ]


@dataclass(frozen=True)
class Labels:
    """Tokens of one rank that predict a label, and labels whose losses it works out: the same ones, unless they are exchanged."""

    rows: Tensor  # (M,) int64 of this rank's flattened (T'/cp * R) states, in the order in which they are sent
    targets: Tensor  # (N,) int64 tokens that are predicted
    at: tuple[Tensor, Tensor]  # (row, column) of each such label in `Parts`
    exchange: LabelExchange | None = None  # how states get to the ranks of their labels; None: each rank keeps its own


class ContextShard:
    """The tokens that this context-parallel rank holds of a micro-batch's rows."""

    def __init__(self, parts: Parts, row: PackedLayout, cp_group: ProcessGroup | None) -> None:
        """`row`: the layout of each of the rows, which for a padded batch is one segment."""
        self.parts, self.row, self.cp_group, whole = parts, row, cp_group, parts.whole
        self.rank, self.size = rank, size = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
        self.index = row.cp_index(rank, size) if whole is None else whole.index(rank)
        # column of the row -> its place where the ranks' tokens stand one behind the other, and among this rank's, or -1
        self.restore_index = self.local = self.index
        if size > 1:
            self.restore_index = row.cp_restore_index(size) if whole is None else whole.restore_index()
            first, stop = rank * len(self.index), (rank + 1) * len(self.index)
            local = (self.restore_index >= first) & (self.restore_index < stop)
            self.local = torch.where(local, self.restore_index - first, -1)

    def take(self, x: Tensor) -> Tensor:
        """(R, T') -> (R, T'/cp)."""
        return x.index_select(1, self.index)

    def positions(self) -> Tensor:
        """(A, R, T'/cp)."""
        if self.parts.whole is not None:
            return self.parts.positions.index_select(2, self.index)
        return self.row.cp_shard(self.parts.positions, self.rank, self.size, dim=2)

    def seq_params(self, bidirectional: Tensor | None, device: torch.device, padded: bool) -> SeqParams | None:
        """Offsets of the packed row, and its bidirectional spans (tokens (R, T') bool); None where there is neither.

        They are those of the whole row where ranks hold chunks of it, and of this rank's where they hold segments.
        """
        parts, whole, spans = self.parts, self.parts.whole, None
        if bidirectional is not None:
            tokens = (bidirectional & ~parts.padding_mask, parts.token_index)
            spans = BidirectionalSpans.from_mask(*(tokens if whole is None else map(self.take, tokens)))
        if padded:
            return SeqParams(qkv_format="sbhd", bidirectional=spans) if spans and spans.spans else None
        layout = parts.layout if whole is None else whole.local(self.rank)
        return SeqParams.from_layout(layout.to(device), self.cp_group, spans, cut=whole is None)

    def placements(self, placements: Mapping[str, Placement], shares: Mapping[str, RankShare]) -> dict[str, Placement]:
        """Rows as this rank counts them, of embeddings as they stand once gathered."""
        rows, local_placements = self.parts.input_ids.shape[0], {}
        for name, placement in placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            local = self.local[column]
            keep = local >= 0
            source = placement.source[keep]
            if name in shares:
                source = shares[name].index[source]
            local_placements[name] = Placement(local[keep] * rows + row[keep], source)
        return local_placements

    def labels(self, ahead: int = 1) -> Labels:
        """Labels whose losses this rank works out, each predicted by the token `ahead` tokens before it in its own segment."""
        parts, rows = self.parts, self.parts.labels.shape[0]
        follows = (parts.labels[:, ahead:] != IGNORE) & (parts.token_index[:, ahead:] >= ahead)
        row, column = follows.nonzero(as_tuple=True)
        assert bool((parts.segment_ids[row, column + ahead] == parts.segment_ids[row, column]).all()), (
            "a label out of its segment"
        )
        state = self.restore_index[column] * rows + row
        if self.cp_group is None or self.size == 1:
            return Labels(state, parts.labels[row, column + ahead], (row, column + ahead))
        state, order = state.sort()
        label = (row[order], column[order] + ahead)
        states = len(self.index) * rows
        counts = torch.bincount(state // states, minlength=self.size).tolist()
        sent, received = balance_labels(counts, self.rank)
        rank_states = state.split(counts)[self.rank] - self.rank * states
        first = len(state) * self.rank // self.size
        label = (label[0].narrow(0, first, sum(received)), label[1].narrow(0, first, sum(received)))
        return Labels(rank_states, parts.labels[label], label, LabelExchange(self.cp_group, sent, received))

    def last_tokens(self, *, every: bool = False) -> Labels:
        """The last token of each segment, where this rank holds it: it predicts a token that is not there yet; `every`: all its tokens."""
        parts = self.parts
        follows = F.pad(parts.segment_ids, (0, 1), value=-1)[:, 1:]
        real = (parts.segment_ids >= 0) & ~parts.padding_mask
        row, column = (real if every else real & (follows != parts.segment_ids)).nonzero(as_tuple=True)
        local = self.local[column]
        keep = local >= 0
        row, column = row[keep], column[keep]
        return Labels(local[keep] * len(parts.labels) + row, parts.input_ids[row, column], (row, column))

    def successors(self, depth: int) -> tuple[Tensor, Tensor, dict[str, Placement]]:
        """The token `depth` tokens after each token of this rank in its own segment, for multi-token prediction.

        Returns (R, T'/cp) int64 ids, 0 where there is none; (R, T'/cp) bool, True where there is none; and the placements of
        their media, rows counted over the whole micro-batch.
        """
        parts, rows = self.parts, self.parts.input_ids.shape[0]
        exists = (parts.token_index >= depth) & ~parts.padding_mask  # as some token's token t + depth
        exists = F.pad(exists[:, depth:], (0, depth))
        ids = F.pad(parts.input_ids[:, depth:], (0, depth)).masked_fill(~exists, 0)
        placements = {}
        for name, placement in parts.placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            keep = parts.token_index[row, column] >= depth
            flat = (column - depth) * rows + row
            placements[name] = Placement(flat[keep], placement.source[keep])
        return self.take(ids), ~self.take(exists), placements
