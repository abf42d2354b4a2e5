"""`PackedStep`: from a micro-batch on the host to the loss, in small stages a family may override.

    capture -> pack -> positions -> place -> shard -> forward -> loss

Everything up to `shard` runs on host tensors whose sizes the host knows, so nothing waits for the device.
`capture` reads lengths or the mask before anything strips them; a batch whose lengths can't be known is
refused. One index, `layout.cp_index`, cuts everything that has a token axis.

A step keeps nothing of a call: packed, padded and evaluation calls can alternate on one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zoo.nn.attention import SeqParams
from zoo.nn.multimodal import ModelInputs, Placement
from zoo.packing import PackedLayout

IGNORE = -100  # label of a token that carries no loss, as in torch.nn.CrossEntropyLoss


class MicroBatchLike(Protocol):
    """What a step reads of a micro-batch; `zoo.data.MicroBatch` is one, a foreign loop may bring its own.

    input_ids, labels: (B, T0) int64 padded, with `attention_mask` (B, T0); or (1, T) packed, with `lengths`.
    labels are not shifted. media: tensors of all samples in order, concatenated along axis 0.
    """

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    lengths: tuple[int, ...] | None
    media: Mapping[str, Tensor]


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
    placements: Mapping[str, Placement]  # rows counted over the whole micro-batch, seq-major: t * R + r


@dataclass(frozen=True)
class StepOutput:
    """What the loss needs beside the model's output, on this rank."""

    label_segments: Tensor  # (N,) int64 on the host: the segment of each label row of this rank
    num_segments: int


class PackedStep:
    """One step of a family: subclass and override the stages that differ (`positions`, `tower_tokens`)."""

    def __init__(self, config: Any, packing: Any, device: torch.device | str, cp_group: Any = None) -> None:
        """`config`: the family's config; `packing`: zoo.config.schema.PackingConfig; `cp_group`: or None."""
        self.config = config
        self.packing = packing
        self.device = torch.device(device)
        self.cp_group = cp_group
        self.cp_rank = cp_group.rank() if cp_group is not None else 0
        self.cp_size = cp_group.size() if cp_group is not None else 1

    def __call__(
        self,
        batches: Iterator[MicroBatchLike],
        model: Any,
        *,
        loss_scale: Tensor | float,
        evaluate: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        """mcore's forward step: (model output, function from it to loss and figures).

        `loss_scale` multiplies the sum of negative log likelihoods (see `zoo.engine.loop`).
        """
        inputs, output_facts = self.prepare(next(batches), evaluate=evaluate)
        output = self.forward(model, inputs)

        def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.loss(output, output_facts, loss_scale, evaluate)

        return output, loss_func

    def prepare(
        self, batch: MicroBatchLike, *, evaluate: bool = False, logits: bool = False
    ) -> tuple[ModelInputs, StepOutput]:
        """All host stages: capture, pack, positions, place, shard."""
        layout = self.capture(batch)
        return self.shard(self.pack(batch, layout), batch.media, evaluate=evaluate, logits=logits)

    def capture(self, batch: MicroBatchLike) -> PackedLayout:
        """The layout of the micro-batch, from its lengths or its mask.

        Raises ValueError for a batch that has neither: lengths are never guessed from labels or token ids.
        """
        align = self.packing.align or 1
        pad_to = (
            self.packing.pad_to if self.packing.mode == "thd" else None
        )  # none: the width of a padded row
        if batch.lengths is not None and batch.attention_mask is None:
            layout = PackedLayout.from_lengths(batch.lengths, align, pad_to)
            if batch.input_ids.shape[0] != 1 or batch.input_ids.shape[1] not in (
                layout.total,
                layout.real_tokens,
            ):
                raise ValueError(
                    f"packed input_ids has shape {tuple(batch.input_ids.shape)}, its lengths sum to "
                    f"{layout.real_tokens} (padded {layout.total}); (1, T) with T one of the two is wanted"
                )
            return layout
        if batch.attention_mask is not None:
            return PackedLayout.from_mask(batch.attention_mask, align, pad_to)
        raise ValueError(
            "the batch has neither lengths nor an attention_mask, so its samples can't be told apart; "
            "hand over one of them (labels and token ids are never used to guess)"
        )

    def pack(self, batch: MicroBatchLike, layout: PackedLayout) -> Parts:
        """Tokens and labels in a row (packing.mode=thd), or back in padded rows (none)."""
        labels = batch.labels if batch.labels is not None else torch.full_like(batch.input_ids, IGNORE)
        if batch.attention_mask is not None:
            ids, labels = layout.pack(batch.input_ids), layout.pack(labels, fill=IGNORE)
        elif batch.input_ids.shape[1] == layout.total:
            ids, labels = batch.input_ids, labels.masked_fill(layout.padding_mask, IGNORE)
        else:
            ids = layout.pack_list(batch.input_ids[0].split(list(layout.lengths)))
            labels = layout.pack_list(labels[0].split(list(layout.lengths)), fill=IGNORE)
        positions = self.positions(ids, layout, batch.media)
        rows = [ids, labels, positions, layout.padding_mask, layout.positions, layout.segment_ids]
        if self.packing.mode == "none":
            rows = self._padded_rows(rows, layout)
        ids, labels, positions, padding, index, segments = rows
        placements = self.place(ids, padding)
        return Parts(layout, ids, labels, positions, padding, index, segments, placements)

    def _padded_rows(self, rows: list[Tensor], layout: PackedLayout) -> list[Tensor]:
        """Packed (1, T) tensors as right-padded (B, W); W is the longest length, aligned, or pad_to."""
        align = self.packing.align or 1
        width = self.packing.pad_to or -(-max(layout.lengths) // align) * align
        plain = PackedLayout(layout.lengths, layout.padded_lengths, layout.align, layout.pad_to)
        ids, labels, positions, padding, _, segments = rows
        wide = plain.unpack(positions.permute(1, 2, 0), width).permute(2, 0, 1)
        index = torch.arange(width).expand(layout.num_segments, width)
        return [
            plain.unpack(ids, width),
            plain.unpack(labels, width, fill=IGNORE),
            wide,
            plain.unpack(padding, width, fill=True),
            index,
            plain.unpack(segments, width, fill=-1),
        ]

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(A, 1, T) positions of the packed row (1, T), starting again in each segment. Plain by default."""
        return layout.positions[None]

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Tower name -> token ids of its placeholders, in the order in which it encodes their media."""
        return {}

    def place(self, ids: Tensor, padding: Tensor) -> dict[str, Placement]:
        """Where each tower's embeddings go: the placeholders in row order, one after the other."""
        placements = {}
        width = ids.shape[0]
        for name, tokens in self.tower_tokens().items():
            rows = []
            for token in tokens:
                row, column = ((ids == token) & ~padding).nonzero(as_tuple=True)
                rows.append(column * width + row)
            flat = torch.cat(rows)
            if len(flat):
                placements[name] = Placement(flat, torch.arange(len(flat)))
        return placements

    def shard(
        self, parts: Parts, media: Mapping[str, Tensor], *, evaluate: bool, logits: bool
    ) -> tuple[ModelInputs, StepOutput]:
        """This context-parallel rank's share of everything, by one index, on the device."""
        rows, width = parts.input_ids.shape
        padded = self.packing.mode == "none"
        layout = PackedLayout.from_lengths([width]) if padded else parts.layout
        index = layout.cp_index(self.cp_rank, self.cp_size)
        local = torch.full((width,), -1, dtype=torch.int64)
        local[index] = torch.arange(len(index))
        label_rows, targets, segments = self._labels(parts, local)
        padding = parts.padding_mask.index_select(1, index)
        has_padding = bool(parts.padding_mask.any())
        seq_params = None if padded else SeqParams.of(parts.layout.to(self.device), self.cp_group)
        inputs = ModelInputs(
            input_ids=self._move(parts.input_ids.index_select(1, index)),
            positions=self._move(parts.positions.index_select(2, index)),
            padding_mask=self._move(padding) if has_padding else None,
            seq_params=seq_params,
            media={name: self._move(tensor) for name, tensor in media.items()},
            placements={n: self._local_placement(p, local, rows) for n, p in parts.placements.items()},
            label_rows=None if logits else self._move(label_rows),
            targets=None if logits else self._move(targets),
            count_correct=evaluate,
        )
        return inputs, StepOutput(segments, parts.layout.num_segments)

    def _labels(self, parts: Parts, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, targets, segments) of this rank's tokens whose successor in their segment has a label."""
        follows = (parts.labels[:, 1:] != IGNORE) & (parts.token_index[:, 1:] > 0)
        row, column = follows.nonzero(as_tuple=True)
        here = local[column]
        keep = here >= 0
        row, column, here = row[keep], column[keep], here[keep]
        flat = here * parts.labels.shape[0] + row
        return flat, parts.labels[row, column + 1], parts.segment_ids[row, column]

    @staticmethod
    def _local_placement(placement: Placement, local: Tensor, rows: int) -> Placement:
        column, row = placement.rows // rows, placement.rows % rows
        here = local[column]
        keep = here >= 0
        return Placement(here[keep] * rows + row[keep], placement.source[keep])

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def forward(self, model: Any, inputs: ModelInputs) -> Tensor:
        """The model's part of this pipeline stage."""
        output: Tensor = model(inputs)
        return output

    def loss(
        self, output: Tensor, facts: StepOutput, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over this rank's labels times `loss_scale`, and figures for the log.

        Figures: `nll` and `labels`, sums over this rank; under `evaluate` also per segment (S,) `segment_nll`,
        `segment_labels` and `segment_correct`.
        """
        nll = output[0] if evaluate else output
        total = nll.sum()
        figures = {
            "nll": total.detach().float(),
            "labels": torch.tensor(float(nll.shape[0]), device=nll.device),
        }
        if evaluate:
            segments = facts.label_segments.to(nll.device)
            zeros = nll.new_zeros(facts.num_segments)
            figures["segment_nll"] = zeros.index_add(0, segments, nll)
            figures["segment_labels"] = zeros.index_add(0, segments, torch.ones_like(nll))
            figures["segment_correct"] = zeros.index_add(0, segments, output[1])
        return total * loss_scale, figures
