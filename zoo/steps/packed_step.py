"""`PackedStep`: from a micro-batch on the host to the loss, in small stages a family may override.

    capture -> pack (expand) -> positions -> place -> shard -> forward -> loss

Everything up to `shard` runs on host tensors whose sizes the host knows, so nothing waits for the device.
`capture` reads lengths or the mask before anything strips them; a batch whose lengths can't be known is
refused. One index, `layout.cp_index`, cuts everything that has a token axis.

A step keeps nothing of a call: packed, padded and evaluation calls can alternate on one model.

A foreign loop hands over its own padded (B, T0) batch with its mask, on whatever device, and gets log-probabilities back
in that shape:

    inputs, facts = step.prepare(batch, logprobs=True)
    logprobs = step.logprobs(step.forward(model, inputs), facts)      # (B, T0), differentiable
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.decoder.attention import SeqParams
from zoo.nn.decoder.mtp import Ahead
from zoo.nn.multimodal import ModelInputs, Placement
from zoo.packing import PackedLayout
from zoo.steps.claims import check_layout, check_media, check_positions
from zoo.steps.media import MediaStream, Share, share_out

IGNORE = -100  # label of a token that carries no loss, as in torch.nn.CrossEntropyLoss


FILLS = (0, IGNORE, -1)  # of token ids, labels and places in the caller's batch, on padding


class MicroBatchLike(Protocol):
    """What a step reads of a micro-batch; `zoo.data.MicroBatch` is one, a foreign loop may bring its own.

    input_ids, labels: (B, T0) int64 padded, with `attention_mask` (B, T0); or (1, T) packed, with `lengths`.
    labels are not shifted. media: tensors of all samples in order, concatenated along axis 0. A batch may have `weights`
    too, in the shape of the labels: float weights of the labels in the loss. `masked_is_true` names the sense of its mask,
    as in `PackedLayout.from_mask`. What says the same twice (lengths beside a mask, `cu_seqlens`, `layout`,
    `position_ids`) must agree.
    """

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    lengths: tuple[int, ...] | None
    media: Mapping[str, Tensor]


@dataclass
class HostBatch:
    """A micro-batch whose ids, labels, mask and sizes of media lie on the host, where its layout is worked out."""

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    lengths: tuple[int, ...] | None
    media: Mapping[str, Tensor]
    weights: Tensor | None = None
    position_ids: Tensor | None = None

    @classmethod
    def of(cls, batch: MicroBatchLike) -> HostBatch:
        """The batch itself as the loader makes it; what a foreign loop has on a GPU is copied (the host waits for it)."""
        labels, mask = batch.labels, batch.attention_mask
        weights = getattr(batch, "weights", None)
        return cls(
            batch.input_ids.cpu(),
            None if labels is None else labels.cpu(),
            None if mask is None else mask.cpu(),
            batch.lengths,
            {name: x if x.is_floating_point() else x.cpu() for name, x in batch.media.items()},
            None if weights is None else weights.cpu(),
            getattr(batch, "position_ids", None),
        )


@dataclass(frozen=True)
class Prepared:
    """A micro-batch after all host stages, on its way to the device: what `PackedStep.prepare` gives."""

    inputs: ModelInputs
    facts: StepOutput


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
    source: (
        Tensor  # (R, T') int64 index into the caller's flattened batch, -1 for what the caller doesn't have
    )
    placements: Mapping[str, Placement]  # rows counted over the whole micro-batch, seq-major: t * R + r


@dataclass(frozen=True)
class StepOutput:
    """What the loss needs beside the model's output, on this rank."""

    label_segments: Tensor  # (N,) int64 on the host: the segment of each label row of this rank
    num_segments: int
    label_source: Tensor  # (N,) int64 on the host: the label's place in the caller's flattened batch
    caller_shape: tuple[int, ...]  # of the caller's batch: (B, T0), or (1, T) packed
    ahead_source: Tensor  # (N',) int64 on the host: the same of all depths' labels of multi-token prediction
    label_weights: Tensor | None = None  # (N,) float32 on the device; None where all are 1
    ahead_weights: Tensor | None = None  # (N',) the same of all depths' labels


class PackedStep:
    """One step of a family: subclass and override the stages that differ.

    Those are `positions`, `tower_tokens`, `media_streams`, `tower_inputs`, and `expand` where placeholders come as one
    token each.
    """

    def __init__(
        self,
        config: Any,
        packing: Any,
        device: torch.device | str,
        cp_group: Any = None,
        media_group: Any = None,
        mtp_depths: int = 0,
        mtp_weight: float = 0.0,
        encodes_media: bool = True,
    ) -> None:
        """What a run gives its step; `zoo.engine.model.build.build_step` takes it from a recipe.

        `config`: the family's; `packing`: zoo.config.schema.PackingConfig; `cp_group`: context-parallel group or
        None; `media_group`: tensor and context parallel ranks, which share out the media, or None: each rank encodes
        all; `encodes_media`: this rank has the towers, else media stay on the host; `mtp_depths`: depths of multi-token
        prediction of the model, whose mean loss counts `mtp_weight` times.
        """
        self.config = config
        self.packing = packing
        self.device = torch.device(device)
        self.cp_group = cp_group
        self.cp_rank = cp_group.rank() if cp_group is not None else 0
        self.cp_size = cp_group.size() if cp_group is not None else 1
        self.media_group = media_group
        self.mtp_depths = mtp_depths
        self.mtp_weight = mtp_weight
        self.encodes_media = encodes_media

    def __call__(
        self,
        batches: Iterator[MicroBatchLike | Prepared],
        model: Any,
        *,
        loss_scale: Tensor | float,
        evaluate: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        """mcore's forward step: (model output, function from it to loss and figures).

        `loss_scale` multiplies the sum of negative log likelihoods (see `zoo.engine.train.trainer`). A micro-batch may come prepared.
        """
        batch = next(batches)
        if isinstance(batch, Prepared):
            inputs, output_facts = batch.inputs, batch.facts
        else:
            inputs, output_facts = self.prepare(batch, evaluate=evaluate)
        output = self.forward(model, inputs)

        def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.loss(output, output_facts, loss_scale, evaluate)

        return output, loss_func

    def prepare(
        self, batch: MicroBatchLike, *, evaluate: bool = False, logits: bool = False, logprobs: bool = False
    ) -> tuple[ModelInputs, StepOutput]:
        """All host stages: capture, pack, positions, place, shard.

        `evaluate`: also say whether each label was the most likely token; `logits`: of all tokens, in the place of
        losses; `logprobs`: for `self.logprobs`. Multi-token prediction runs for training alone.
        """
        layout, batch = self.capture(batch), HostBatch.of(batch)
        parts = self.pack(batch, layout)
        if logprobs and batch.labels is None:  # every real token is one to predict
            labels = parts.input_ids.masked_fill(parts.padding_mask | (parts.source < 0), IGNORE)
            parts = replace(parts, labels=labels)
        training = not (evaluate or logits or logprobs)
        inputs, facts = self.shard(parts, batch.media, evaluate=evaluate, logits=logits, training=training)
        facts = replace(facts, caller_shape=tuple(batch.input_ids.shape))
        return inputs, facts if batch.weights is None else self.weigh(facts, batch.weights)

    def weigh(self, facts: StepOutput, weights: Tensor) -> StepOutput:
        """The facts with each label's weight, of `weights` in the caller's shape: padded (B, T0), or (1, T) packed."""
        flat = weights.float().flatten()
        label, ahead = (self._move(flat[source]) for source in (facts.label_source, facts.ahead_source))
        return replace(facts, label_weights=label, ahead_weights=ahead)

    def capture(self, batch: MicroBatchLike) -> PackedLayout:
        """The layout of the micro-batch, from its lengths or its mask.

        Raises ValueError for a batch that has neither: lengths are never guessed from labels or token ids. So it does
        where the batch's facts disagree (`zoo.steps.claims`).
        """
        layout = self._layout(batch)
        check_layout(batch, layout)
        return layout

    def _layout(self, batch: MicroBatchLike) -> PackedLayout:
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
            sense = getattr(batch, "masked_is_true", None)
            return PackedLayout.from_mask(batch.attention_mask, align, pad_to, masked_is_true=sense)
        raise ValueError(
            "the batch has neither lengths nor an attention_mask, so its samples can't be told apart; "
            "hand over one of them (labels and token ids are never used to guess)"
        )

    def pack(self, batch: MicroBatchLike, layout: PackedLayout) -> Parts:
        """Tokens and labels in a row (packing.mode=thd), or back in padded rows (none)."""
        labels = batch.labels if batch.labels is not None else torch.full_like(batch.input_ids, IGNORE)
        source = torch.arange(batch.input_ids.numel()).view(batch.input_ids.shape)
        tokens = (batch.input_ids, labels, source)
        if batch.attention_mask is not None:
            ids, labels, source = (layout.pack(x, fill) for x, fill in zip(tokens, FILLS, strict=True))
        elif batch.input_ids.shape[1] == layout.total:
            ids = batch.input_ids
            labels, source = (
                x.masked_fill(layout.padding_mask, f) for x, f in ((labels, IGNORE), (source, -1))
            )
        else:
            ids, labels, source = (
                layout.pack_list(x[0].split(list(layout.lengths)), fill)
                for x, fill in zip(tokens, FILLS, strict=True)
            )
        layout, ids, labels, source = self.expand(layout, ids, labels, source, batch.media)
        positions = self.positions(ids, layout, batch.media)
        check_positions(getattr(batch, "position_ids", None), source, positions, batch.input_ids.shape)
        rows = [ids, labels, positions, layout.padding_mask, layout.positions, layout.segment_ids, source]
        if self.packing.mode == "none":
            rows = self._padded_rows(rows, layout)
        ids, labels, positions, padding, index, segments, source = rows
        placements = self.place(ids, padding)
        return Parts(layout, ids, labels, positions, padding, index, segments, source, placements)

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        """Placeholders as many tokens as their media have embeddings; by default the processor has done so.

        A family whose processor may leave one token a medium calls `zoo.steps.expansion.expand_row` here.
        """
        return layout, ids, labels, source

    def _padded_rows(self, rows: list[Tensor], layout: PackedLayout) -> list[Tensor]:
        """Packed (1, T) tensors as right-padded (B, W); W is the longest length, aligned, or pad_to."""
        align = self.packing.align or 1
        width = self.packing.pad_to or -(-max(layout.lengths) // align) * align
        plain = layout.without_batch()
        ids, labels, positions, padding, _, segments, source = rows
        wide = plain.unpack(positions, width, batch_dim=1)
        index = torch.arange(width).expand(layout.num_segments, width)
        return [
            plain.unpack(ids, width),
            plain.unpack(labels, width, fill=IGNORE),
            wide,
            plain.unpack(padding, width, fill=True),
            index,
            plain.unpack(segments, width, fill=-1),
            plain.unpack(source, width, fill=-1),
        ]

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(A, 1, T) positions of the packed row (1, T), starting again in each segment. Plain by default."""
        return layout.positions[None]

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Tower name -> token ids of its placeholders, in the order in which it encodes their media."""
        return {}

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Tower name -> its media in the order in which it encodes them, of towers that have any in this batch."""
        return {}

    def tower_inputs(self, media: Mapping[str, Tensor]) -> Mapping[str, Tensor | int]:
        """What a tower would work out of the sizes of the media that this rank encodes, as `<tower>.<argument>`.

        On a GPU a tower waits for each number that it reads; here the host works them out while a step before is computed.
        """
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
        self,
        parts: Parts,
        media: Mapping[str, Tensor],
        *,
        evaluate: bool,
        logits: bool,
        training: bool = True,
    ) -> tuple[ModelInputs, StepOutput]:
        """This context-parallel rank's share of everything, by one index, on the device."""
        rows, width = parts.input_ids.shape
        padded = self.packing.mode == "none"
        layout = PackedLayout.from_lengths([width]) if padded else parts.layout
        index = layout.cp_index(self.cp_rank, self.cp_size)
        local = torch.full((width,), -1, dtype=torch.int64)
        local[index] = torch.arange(len(index))
        label_rows, targets, labelled = self._labels(parts, local)
        padding = parts.padding_mask.index_select(1, index)
        has_padding = bool(parts.padding_mask.any())
        seq_params = None if padded else SeqParams.of(parts.layout.to(self.device), self.cp_group)
        streams = self.media_streams(media)
        check_media(streams, media, {name: len(place.rows) for name, place in parts.placements.items()})
        shares = self._shares(streams, media)
        if shares:
            media = {name: rows for share in shares.values() for name, rows in share.media.items()}
        given: dict[str, Any] = {**media, **self.tower_inputs(media)} if self.encodes_media else {}
        # Sizes of media stay on the host: whoever needs a number of them must not have to ask the device for it.
        sizes = {stream.sizes for parts_of in streams.values() for stream in parts_of}
        depths = self.mtp_depths if training else 0
        ahead = [self._ahead(parts, depth, index, local, shares) for depth in range(1, depths + 1)]
        inputs = ModelInputs(
            input_ids=self._move(parts.input_ids.index_select(1, index)),
            positions=self._move(layout.cp_shard(parts.positions, self.cp_rank, self.cp_size, dim=2)),
            padding_mask=self._move(padding) if has_padding else None,
            seq_params=seq_params,
            media={name: x if name in sizes else self._move(x) for name, x in given.items()},
            placements=self._local_placements(parts.placements, local, rows, shares),
            shared={name: share.longest for name, share in shares.items()},
            label_rows=None if logits else self._move(label_rows),
            targets=None if logits else self._move(targets),
            count_correct=evaluate,
            ahead=tuple(depth for depth, _ in ahead),
        )
        segments, source = (x[labelled] for x in (parts.segment_ids, parts.source))
        further = torch.cat([source[:0], *(places for _, places in ahead)])
        return inputs, StepOutput(segments, parts.layout.num_segments, source, (), further)

    def _shares(
        self, streams: Mapping[str, tuple[MediaStream, ...]], media: Mapping[str, Tensor]
    ) -> dict[str, Share]:
        """This rank's share of each tower's media; {} where there is nobody to share them with."""
        if self.media_group is None or self.media_group.size() == 1:
            return {}
        rank, size = self.media_group.rank(), self.media_group.size()
        return {name: share_out(tower, media, rank, size) for name, tower in streams.items() if tower}

    def _labels(
        self, parts: Parts, local: Tensor, ahead: int = 1
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """(rows, targets, (row, column) of the labels) of this rank's tokens that predict the one `ahead` of them."""
        follows = (parts.labels[:, ahead:] != IGNORE) & (parts.token_index[:, ahead:] >= ahead)
        row, column = follows.nonzero(as_tuple=True)
        here = local[column]
        keep = here >= 0
        row, column, here = row[keep], column[keep], here[keep]
        label = (row, column + ahead)
        assert bool((parts.segment_ids[label] == parts.segment_ids[row, column]).all()), (
            "a label out of its segment"
        )
        return here * parts.labels.shape[0] + row, parts.labels[label], label

    def _ahead(
        self, parts: Parts, depth: int, index: Tensor, local: Tensor, shares: Mapping[str, Share]
    ) -> tuple[Ahead, Tensor]:
        """What depth `depth` of multi-token prediction reads and predicts (`zoo.nn.decoder.mtp` shows it by an example), and its
        labels' places in the caller's flattened batch."""
        rows = parts.input_ids.shape[0]
        there = (parts.token_index >= depth) & ~parts.padding_mask  # as somebody's token t + depth
        there = F.pad(there[:, depth:], (0, depth))
        ids = F.pad(parts.input_ids[:, depth:], (0, depth)).masked_fill(~there, 0)
        placements = {}
        for name, placement in parts.placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            keep = parts.token_index[row, column] >= depth
            flat = (column - depth) * rows + row
            placements[name] = Placement(flat[keep], placement.source[keep])
        label_rows, targets, labelled = self._labels(parts, local, depth + 1)
        ahead = Ahead(
            input_ids=self._move(ids.index_select(1, index)),
            padding_mask=self._move(~there.index_select(1, index)),
            placements=self._local_placements(placements, local, rows, shares),
            label_rows=self._move(label_rows),
            targets=self._move(targets),
        )
        return ahead, parts.source[labelled]

    @staticmethod
    def _local_placements(
        placements: Mapping[str, Placement], local: Tensor, rows: int, shares: Mapping[str, Share]
    ) -> dict[str, Placement]:
        """Rows as this rank counts them, of embeddings as they stand once gathered."""
        found = {}
        for name, placement in placements.items():
            column, row = placement.rows // rows, placement.rows % rows
            here = local[column]
            keep = here >= 0
            source = placement.source[keep]
            if name in shares:
                source = shares[name].place[source]
            found[name] = Placement(here[keep] * rows + row[keep], source)
        return found

    def _move(self, tensor: Any) -> Any:
        """A tensor on its way to the device; a number as it is."""
        if self.device.type == "cuda" and isinstance(tensor, Tensor) and not tensor.is_cuda:
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def forward(self, model: Any, inputs: ModelInputs) -> Tensor:
        """The model's part of this pipeline stage."""
        output: Tensor = model(inputs)
        return output

    def loss(
        self, output: Tensor, facts: StepOutput, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over this rank's labels, each times its weight, times `loss_scale`, and figures for the log.

        The mean over depths of multi-token prediction is added `mtp_weight` times, each depth's sum over its labels
        scaled like the decoder's (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25: divided by the same count).

        Figures: `nll`, `labels` (their number) and `weight` (of theirs), sums over this rank, and `mtp_nll`; under
        `evaluate` also per segment (S,) `segment_nll`, `segment_labels`, `segment_weight` and `segment_correct`.
        """
        nll = output[0] if evaluate else output
        nll, ahead = nll.tensor_split([len(facts.label_segments)])
        weights = facts.label_weights
        if weights is not None and facts.ahead_weights is not None:
            nll, ahead = nll * weights, ahead * facts.ahead_weights[: len(ahead)]
        total = nll.sum()
        labels = nll.new_full((), float(nll.shape[0]))
        figures = {
            "nll": total.detach().float(),
            "labels": labels,
            "weight": labels if weights is None else weights.sum(),
        }
        if self.mtp_depths and not evaluate:
            further = ahead.sum() / self.mtp_depths
            total = total + self.mtp_weight * further
            figures["mtp_nll"] = further.detach().float()
        if evaluate:
            segments = facts.label_segments.to(nll.device)
            zeros = nll.new_zeros(facts.num_segments)
            figures["segment_nll"] = zeros.index_add(0, segments, nll)
            ones = torch.ones_like(nll)
            figures["segment_labels"] = zeros.index_add(0, segments, ones)
            figures["segment_weight"] = zeros.index_add(
                0, segments, ones if weights is None else weights.to(nll.dtype)
            )
            figures["segment_correct"] = zeros.index_add(0, segments, output[1])
        return total * loss_scale, figures

    def logprobs(self, output: Tensor, facts: StepOutput) -> Tensor:
        """Log-probability of each token given those before it in its sample, in the caller's shape.

        `output` and `facts` of a batch that was prepared with `logprobs=True`, on the last pipeline stage. The result is
        (B, T0) fp32 ((1, T) for a packed batch), its entry at a token that token's own, and 0 where there is none: on
        padding, at a sample's first token and, where the batch has labels, at tokens without. Whole on every
        context-parallel rank, and differentiable.

        A loss of it is computed alike on all tensor and context parallel ranks, from these values alone. Its gradient has
        the right scale when gradients are *averaged* over data and context parallel ranks together, as zoo's and
        megatron-core's DDP do (call `finalize_model_grads` after the last `backward()`), and PyTorch's: the result is the
        mean of the data-parallel ranks' losses. Without a DDP, add the gradients up over these ranks
        (`parallel_state.get_data_parallel_group(with_context_parallel=True)`) and divide by their number; the same number
        for experts, which are added up over the expert data-parallel group. To that end, each rank's gradient is
        multiplied by the context-parallel size. A loss that megatron-core's schedules run (`get_forward_backward_func`, the
        loss function giving back two values) is multiplied by that size there, and so not here; they divide it by the
        number of micro-batches.
        """
        size = math.prod(facts.caller_shape)
        rows = facts.label_source.to(output.device, non_blocking=True)
        flat = output.new_zeros(size).index_copy(0, rows, -output)
        if self.cp_size > 1:
            flat = _SumOverContext.apply(flat, self.cp_group, 1 if _in_a_schedule() else self.cp_size)
        return flat.view(facts.caller_shape)


class _SumOverContext(torch.autograd.Function):
    """The sum of a tensor over a group; backward, each rank's gradient of it `factor` times."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any, factor: int) -> Tensor:
        ctx.factor = factor
        total = mine.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor, None, None


def _in_a_schedule() -> bool:
    """Whether one of megatron-core's schedules called: these multiply the loss by the context-parallel size."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "megatron.core.pipeline_parallel.schedules":
            return True
        frame = frame.f_back
    return False
