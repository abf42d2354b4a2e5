"""`PackedStep`: from a micro-batch on the host to the loss, in small stages a family may override.

    capture -> pack (expand) -> positions -> place -> shard -> forward -> loss

Everything up to `shard` runs on host tensors whose sizes the host knows, so nothing waits for the device.
`capture` reads lengths or the mask before anything strips them; a batch whose lengths can't be known is
refused. One index cuts everything that has a token axis: `layout.cp_index`, or `WholeSegments.index` where context-parallel
ranks hold samples whole.

A step keeps nothing of a call: packed, padded and evaluation calls can alternate on one model.

A foreign loop hands over its own padded (B, T0) batch with its mask, on whatever device, and gets log-probabilities back
in that shape:

    inputs, loss_inputs = step.prepare(batch, logprobs=True)
    logprobs = step.logprobs(step.forward(model, inputs), loss_inputs)      # (B, T0), differentiable
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.nn.decoder.label_shares import Exchange
from zoo.nn.decoder.mtp import Ahead
from zoo.nn.head.distillation import Teaching, TopTokens
from zoo.nn.inputs import ModelInputs, Placement
from zoo.packing import PackedLayout
from zoo.steps.batch import HostBatch, MicroBatchLike, layout_of
from zoo.steps.claims import check_ids, check_layout, check_media, check_positions
from zoo.steps.logprobs import caller_values
from zoo.steps.losses.distillation import DistillationLoss
from zoo.steps.losses.preference import AnswerLoss
from zoo.steps.losses.sums import LossInputs, answer_loss, distillation_loss, label_loss
from zoo.steps.media import MediaStream, RankShare, rank_share
from zoo.steps.shard import IGNORE, ContextShard, Labels, Parts, padded_rows
from zoo.steps.whole_segments import WholeSegments, whole_segments

FILLS = (0, IGNORE, -1)  # of token ids, labels and places in the caller's batch, on padding


@dataclass(frozen=True)
class Prepared:
    """A micro-batch after all host stages, on its way to the device: what `PackedStep.prepare` gives."""

    inputs: ModelInputs
    loss_inputs: LossInputs


class PackedStep:
    """One step of a family: subclass and override the stages that differ.

    Those are `positions`, `tower_tokens`, `media_streams`, `tower_inputs`, `two_way_tokens`, and `expand` where placeholders come as one
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
        preference: AnswerLoss | None = None,
        distillation: DistillationLoss | None = None,
        flops: Callable[[int], float] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """What a run gives its step; `zoo.model.build.build_step` takes it from a recipe.

        `config`: the family's; `packing`: zoo.config.schema.PackingConfig; `cp_group`: context-parallel group or
        None; `media_group`: tensor and context parallel ranks, which share out the media, or None: each rank encodes
        all; `encodes_media`: this rank has the towers, else media stay on the host; `mtp_depths`: depths of multi-token
        prediction of the model, whose mean loss counts `mtp_weight` times; `preference`: the loss of training batches, whose
        samples are pairs or labelled answers; None: that of each label, or of
        `distillation`, whose batches bring what a teacher says of them (`teaching`); `flops`: what the decoder takes for a sample of
        so many tokens, by which context-parallel ranks hold samples whole where that is no more work (`zoo.steps.whole_segments`); None: all are cut;
        `vocabulary`: rows of the embedding, which no id may exceed; None: it is not checked.
        """
        self.config, self.packing = config, packing
        self.device = torch.device(device)
        self.cp_group = cp_group
        self.cp_rank = cp_group.rank() if cp_group is not None else 0
        self.cp_size = cp_group.size() if cp_group is not None else 1
        self.media_group = media_group
        self.mtp_depths, self.mtp_weight = mtp_depths, mtp_weight
        self.encodes_media, self.flops, self.vocabulary = encodes_media, flops, vocabulary
        self.preference, self.distillation = preference, distillation
        self.reported = preference or distillation  # the loss that has metrics of its own
        # Whether the model gives a score of each sample's last state.
        self.scores = preference is not None and preference.scores

    def __call__(
        self,
        batches: Iterator[MicroBatchLike | Prepared],
        model: Any,
        *,
        loss_scale: Tensor | float,
        evaluate: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        """mcore's forward step: (model output, function from it to loss and metrics).

        `loss_scale` multiplies the sum of negative log likelihoods (see `zoo.training.trainer`). A micro-batch may come prepared.
        """
        batch = next(batches)
        if isinstance(batch, Prepared):
            inputs, loss_inputs = batch.inputs, batch.loss_inputs
        else:
            inputs, loss_inputs = self.prepare(batch, evaluate=evaluate)
        output = self.forward(model, inputs)

        def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.loss(output, loss_inputs, loss_scale, evaluate)

        return output, loss_func

    def prepare(
        self,
        batch: MicroBatchLike,
        *,
        evaluate: bool = False,
        logits: bool | Literal["last"] = False,
        logprobs: bool = False,
        entropy: bool = False,
        temperature: float | Tensor = 1.0,
        experts: Tensor | Literal["noted"] | None = None,
    ) -> tuple[ModelInputs, LossInputs]:
        """All host stages: capture, pack, positions, place, shard.

        `evaluate`: also say whether each label was the most likely token; `logits`: of all tokens, or of each sample's last
        one, in the place of losses; `logprobs`: for `self.logprobs`, with `entropy` for `self.entropy` too, of logits
        divided by `temperature`, a number or (S,) of the samples. Multi-token prediction runs for training alone. `experts`:
        those of each token, (B, T0, L, k) int64, -1 where the router chooses, or that they are to be noted (`Routing`).
        """
        layout, batch = self.capture(batch), HostBatch.of(batch)
        logits = "last" if self.scores else logits
        if logprobs and batch.labels is None:  # every real token is one to predict, as it came
            batch = replace(batch, labels=batch.input_ids)
        parts = self.pack(batch, layout)
        training = not (evaluate or logits or logprobs)
        inputs, found = self.shard(parts, batch.media, evaluate=evaluate, logits=logits, training=training)
        found = replace(found, caller_shape=tuple(batch.input_ids.shape), spare=bool(batch.spare))
        if isinstance(temperature, Tensor):
            temperature = self._move(temperature.float().cpu()[found.label_segments])
        most = batch.most_tokens if self.cp_size == 1 else None  # whole samples make rows of other lengths
        inputs = replace(inputs, entropy=entropy, temperature=temperature, most_tokens=most)
        if training and batch.teaching is not None:
            inputs = replace(inputs, teaching=batch.teaching)
        elif training and batch.taught is not None:
            inputs = replace(inputs, teaching=self._teaching(batch.taught, found.label_source))
        if experts is not None:
            source = self._mine(parts).take(parts.source).T.reshape(-1)
            given = None
            if isinstance(experts, Tensor):
                rows = experts.flatten(0, 1)[source.clamp(min=0)].masked_fill(source[:, None, None] < 0, -1)
                given = self._move(rows)
            inputs, found = replace(inputs, routing=Routing(given)), replace(found, token_source=source)
        if batch.reference is not None:
            found = replace(found, reference=self._move(batch.reference.float()))
        if batch.desirable is not None:
            found = replace(found, desirable=self._move(batch.desirable), kl=self._move(batch.kl))
        return inputs, found if batch.weights is None else self.weigh(found, batch.weights)

    def _teaching(self, taught: Any, places: Tensor) -> Teaching:
        """What a teacher on disk says of this rank's labels, by their places in the caller's flattened batch."""
        assert self.distillation is not None
        rows = torch.searchsorted(taught.places, places)
        ids, logprobs, rest = (self._move(one[rows]) for one in taught[:3])
        return Teaching(TopTokens(ids.long(), logprobs, rest), self.distillation.temperature)

    def weigh(self, loss_inputs: LossInputs, weights: Tensor) -> LossInputs:
        """`loss_inputs` with each label's weight; `weights` has the caller's shape, padded (B, T0) or packed (1, T)."""
        flat, sources = weights.float().flatten(), (loss_inputs.label_source, loss_inputs.ahead_source)
        label, ahead = (self._move(flat[source]) for source in sources)
        return replace(loss_inputs, label_weights=label, ahead_weights=ahead)

    def capture(self, batch: MicroBatchLike) -> PackedLayout:
        """The layout of the micro-batch: the one that its loader made, else of its lengths or its mask.

        Raises:
            ValueError: a batch that has none of them, as lengths are never guessed from labels or token ids; or one that
                contradicts itself (`zoo.steps.claims`).
        """
        # packing.mode=none pads each row by itself, see `padded_rows`
        pad_to = self.packing.pad_to if self.packing.mode == "thd" else None
        layout = layout_of(batch, self.packing.align or 1, pad_to)
        check_layout(batch, layout)
        return layout

    def pack(self, batch: MicroBatchLike, layout: PackedLayout) -> Parts:
        """Tokens and labels in a row (packing.mode=thd), or back in padded rows (none)."""
        labels = batch.labels if batch.labels is not None else torch.full_like(batch.input_ids, IGNORE)
        source = torch.arange(batch.input_ids.numel()).view(batch.input_ids.shape)
        tokens = (batch.input_ids, labels, source)
        if batch.attention_mask is not None:
            ids, labels, source = (layout.pack(x, fill) for x, fill in zip(tokens, FILLS, strict=True))
        elif batch.input_ids.shape[1] == layout.total:
            ids = batch.input_ids
            labels, source = (x.masked_fill(layout.padding_mask, f) for x, f in ((labels, IGNORE), (source, -1)))
        else:
            ids, labels, source = (
                layout.pack_list(x[0].split(list(layout.lengths)), fill) for x, fill in zip(tokens, FILLS, strict=True)
            )
        layout, ids, labels, source = self.expand(layout, ids, labels, source, batch.media)
        check_ids(ids, labels, self.vocabulary)
        whole = self._whole_segments(layout)
        if whole is not None:
            tokens = (ids, labels, source)
            ids, labels, source = (whole.lay_out(x, layout, fill) for x, fill in zip(tokens, FILLS, strict=True))
            layout = whole.layout
        positions = self.positions(ids, layout, batch.media)
        check_positions(getattr(batch, "position_ids", None), source, positions, batch.input_ids.shape)
        rows = [ids, labels, positions, layout.padding_mask, layout.positions, layout.segment_ids, source]
        if self.packing.mode == "none":
            rows = padded_rows(rows, layout, self.packing.align or 1, self.packing.pad_to)
        ids, labels, positions, padding, index, segments, source = rows
        placements = self.place(ids, padding)
        return Parts(layout, ids, labels, positions, padding, index, segments, source, placements, whole)

    def _whole_segments(self, layout: PackedLayout) -> WholeSegments | None:
        """How context-parallel ranks hold the samples of a row whole; None where samples are cut."""
        if self.cp_size == 1 or self.flops is None or self.packing.mode == "none":
            return None
        most = max(layout.total, self.packing.budget)
        return whole_segments(layout, self.cp_size, self.flops, most, self.packing.pad_to)

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        """Placeholders as many tokens as their media have embeddings; by default the processor has done so.

        A family whose processor may leave one token a medium calls `zoo.steps.expansion.expand_row` here.
        """
        return layout, ids, labels, source

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(A, 1, T) positions of the packed row (1, T), starting again in each segment. Plain by default."""
        return layout.positions[None]

    def two_way_tokens(self, ids: Tensor) -> Tensor | None:
        """(R, T) bool, the tokens whose runs attend to one another both ways; None: attention is causal. `ids` as it."""
        return None

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
        logits: bool | Literal["last"],
        training: bool = True,
    ) -> tuple[ModelInputs, LossInputs]:
        """This context-parallel rank's part of a packed micro-batch, on the device: tokens, media, labels.

        Args:
            parts: the whole micro-batch, as `pack` gives it.
            media: of the whole micro-batch.
            evaluate: also say whether each label was the most likely token.
            logits: of all tokens, or of each sample's last one, in the place of losses.
            training: run the depths of multi-token prediction.
        """
        mine = self._mine(parts)
        tokens = self._shard_tokens(parts, mine, self.packing.mode == "none")
        towers, shares = self._shard_media(parts, mine, media)
        found = mine.last_tokens() if logits == "last" else mine.labels()
        labels, output = self._shard_labels(parts, mine, shares, self.mtp_depths if training else 0, found)
        if logits:
            labels |= {"targets": None, "label_exchange": None}
            labels |= {} if logits == "last" else {"label_rows": None}
        return ModelInputs(**tokens, **towers, **labels, count_correct=evaluate), output

    def _mine(self, parts: Parts) -> ContextShard:
        """This context-parallel rank's tokens of a micro-batch."""
        padded = self.packing.mode == "none"
        row = PackedLayout.from_lengths([parts.input_ids.shape[1]]) if padded else parts.layout
        return ContextShard(parts, row, self.cp_rank, self.cp_size)

    def _shard_tokens(self, parts: Parts, mine: ContextShard, padded: bool) -> dict[str, Any]:
        """Token ids, positions, padding mask and offsets, as `ModelInputs` names them."""
        has_padding = bool(parts.padding_mask.any())
        return {
            "input_ids": self._move(mine.take(parts.input_ids)),
            "positions": self._move(mine.positions()),
            "padding_mask": self._move(mine.take(parts.padding_mask)) if has_padding else None,
            "seq_params": mine.seq_params(self.two_way_tokens(parts.input_ids), self.cp_group, self.device, padded),
        }

    def _shard_media(
        self, parts: Parts, mine: ContextShard, media: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, RankShare]]:
        """Media that this rank encodes and the rows that their embeddings go to; each tower's share of this rank."""
        streams = self.media_streams(media)
        check_media(streams, media, {name: len(place.rows) for name, place in parts.placements.items()})
        shares = self._shares(streams, media)
        if shares:
            media = {name: rows for share in shares.values() for name, rows in share.media.items()}
        given: dict[str, Any] = {**media, **self.tower_inputs(media)} if self.encodes_media else {}
        # Sizes of media stay on the host: reading one from the device would make the host wait.
        sizes = {stream.sizes for parts_of in streams.values() for stream in parts_of}
        inputs = {
            "media": {name: x if name in sizes else self._move(x) for name, x in given.items()},
            "placements": mine.placements(parts.placements, shares),
            "shared": {name: share.longest for name, share in shares.items()},
        }
        return inputs, shares

    def _shares(
        self, streams: Mapping[str, tuple[MediaStream, ...]], media: Mapping[str, Tensor]
    ) -> dict[str, RankShare]:
        """This rank's share of each tower's media; {} where each rank encodes all."""
        if self.media_group is None or self.media_group.size() == 1:
            return {}
        rank, size = self.media_group.rank(), self.media_group.size()
        place = rank, size, self.device if self.encodes_media else torch.device("meta")  # needs no pixels
        return {name: rank_share(tower, media, *place) for name, tower in streams.items() if tower}

    def _shard_labels(
        self, parts: Parts, mine: ContextShard, shares: Mapping[str, RankShare], depths: int, labels: Labels
    ) -> tuple[dict[str, Any], LossInputs]:
        """Rows that predict a label and what they predict, at each of `depths` further depths too."""
        ahead, places = [], [labels.rows[:0]]  # `zoo.nn.decoder.mtp` shows by an example what a depth reads
        for depth in range(1, depths + 1):
            further = mine.labels(depth + 1)
            ids, padding, placements = mine.successors(depth)
            placed = mine.placements(placements, shares)
            ahead.append(Ahead(self._move(ids), self._move(padding), placed, **self._predicted(further)))
            places.append(parts.source[further.at])
        inputs = {**self._predicted(labels), "ahead": tuple(ahead)}
        segments, source = parts.segment_ids[labels.at], parts.source[labels.at]
        return inputs, LossInputs(segments, parts.layout.num_segments, source, (), torch.cat(places))

    def _predicted(self, labels: Labels) -> dict[str, Any]:
        """Rows, targets and exchange of labels, as `ModelInputs` and `Ahead` name them."""
        exchange = None
        if labels.sent is not None and labels.received is not None:
            exchange = Exchange(self.cp_group, labels.sent, labels.received)
        return {
            "label_rows": self._move(labels.rows),
            "targets": self._move(labels.targets),
            "label_exchange": exchange,
        }

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
        self, output: Tensor, loss_inputs: LossInputs, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over what this rank trains on, labels or answers, times `loss_scale`, and metrics for the log.

        `zoo.steps.losses.sums` has the three kinds of it, and says what their metrics are.
        """
        if self.preference is not None and not evaluate:
            values = -output if self.scores else output
            group = self.cp_group if self.cp_size > 1 else None
            total, metrics = answer_loss(values, loss_inputs, self.preference, group, counts=self.cp_rank == 0)
        elif self.distillation is not None and not evaluate:
            total, metrics = distillation_loss(output, loss_inputs, self.distillation)
        else:
            if self.scores:  # as a log-probability, of one label that is never the most likely token
                output = torch.stack((-output, torch.zeros_like(output)))
            depths = 0 if evaluate else self.mtp_depths
            total, metrics = label_loss(output, loss_inputs, depths, self.mtp_weight, evaluate=evaluate)
        return loss_inputs.counted(total * loss_scale, metrics)

    def logprobs(self, output: Tensor, loss_inputs: LossInputs) -> Tensor:
        """Log-probability of each token given those before it in its sample, in the caller's shape.

        `output` and `loss_inputs` of a batch that was prepared with `logprobs=True`, on the last pipeline stage. The result is
        (B, T0) fp32 ((1, T) for a packed batch), its entry at a token that token's own, and 0 where there is none: on
        padding, at a sample's first token and, where the batch has labels, at tokens without. Whole on every
        context-parallel rank, and differentiable.

        Every tensor and context parallel rank computes the same loss from these values; `zoo.steps.logprobs` says how its
        gradient is scaled.
        """
        return self._for_caller(-(output if output.ndim == 1 else output[0]), loss_inputs)

    def entropy(self, output: Tensor, loss_inputs: LossInputs) -> Tensor:
        """Entropy in nats of what predicts each token, as `logprobs` is laid out; of a batch prepared with `entropy=True`."""
        return self._for_caller(output[1], loss_inputs)

    def _for_caller(self, values: Tensor, loss_inputs: LossInputs) -> Tensor:
        """(N,) of this rank's labels -> the caller's shape, with those of all context-parallel ranks."""
        group = self.cp_group if self.cp_size > 1 else None
        return caller_values(values, loss_inputs.label_source, loss_inputs.caller_shape, group)
