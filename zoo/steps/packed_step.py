"""`PackedStep`: from a micro-batch on the host to the loss, in small stages a family may override.

    capture -> pack (expand) -> positions -> place -> shard -> forward -> loss

Everything up to `shard` runs on host tensors whose sizes the host knows, so nothing waits for the device.
`capture` reads lengths or the mask before anything strips them; a batch whose lengths can't be known is
refused. One index cuts everything that has a token axis: `layout.cp_index`, or `SampleLevelSplit.index` where context-parallel
ranks hold samples whole.

A step keeps nothing of a call: packed, padded and evaluation calls can alternate on one model.

A foreign loop hands over its own padded (B, T0) batch with its mask, on whatever device, and gets log-probabilities back
in that shape:

    inputs, loss_inputs = step.prepare(batch, logprobs=True)
    logprobs = step.logprobs(step.forward(model, inputs), loss_inputs)      # (B, T0), differentiable
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zoo.nn.decoder.experts.router import Routing
from zoo.nn.inputs import ModelInputs, MTPInputs, Placement
from zoo.packing import PackedLayout
from zoo.packing.index import cpu_to_device
from zoo.steps.batch import HostBatch, MicroBatchLike, distillation_inputs, layout_of
from zoo.steps.batch_validation import check_ids, check_layout, check_media, check_positions
from zoo.steps.losses import LossInputs, answer_loss, distillation_loss, label_loss, sum_over_context
from zoo.steps.media import MediaStream, RankShare, for_towers, rank_share
from zoo.steps.objectives.objective import Objective, StepRank
from zoo.steps.objectives.policy import policy_inputs, policy_loss
from zoo.steps.objectives.retrieval import retrieval_loss
from zoo.steps.sample_level_cp import SampleLevelSplit, split_by_samples
from zoo.steps.shard import IGNORE, ContextShard, Parts, padded_rows

if TYPE_CHECKING:
    from zoo.config.schema import PackingConfig
    from zoo.nn.family import FamilyConfig

FILLS = (0, IGNORE, -1)  # of token ids, labels and places in the caller's batch, on padding


@dataclass(frozen=True)
class Prepared:
    """A micro-batch after all host stages, on its way to the device: what `PackedStep.prepare` gives."""

    inputs: ModelInputs
    loss_inputs: LossInputs


class PackedStep:
    """One step of a family: subclass and override the stages that differ.

    Those are `positions`, `tower_tokens`, `media_streams`, `tower_inputs`, `bidirectional_tokens`, and `expand` where placeholders
    come as one token each.
    """

    config: FamilyConfig  # a subclass names its family's

    def __init__(
        self,
        config: FamilyConfig,
        packing: PackingConfig,
        rank: StepRank,
        objective: Objective | None = None,
        *,
        flops: Callable[[int], float] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """A step as `zoo.model.build.build_step` makes it from a recipe.

        Args:
            config: the family's.
            packing: the recipe's.
            rank: where it runs.
            objective: what it trains on; None: the labels.
            flops: what the decoder takes for a sample of so many tokens, by which context-parallel ranks hold samples whole
                where that is no more work (`zoo.steps.sample_level_cp`); None: all are cut.
            vocabulary: rows of the embedding, which no id may exceed; None: it is not checked.
        """
        objective = objective or Objective()
        self.config, self.packing = config, packing
        self.device, self.cp_group, self.media_group = rank.device, rank.cp_group, rank.media_group
        self.encodes_media, self.flops, self.vocabulary = rank.encodes_media, flops, vocabulary
        self.cp_rank, self.cp_size = (0, 1) if rank.cp_group is None else (rank.cp_group.rank(), rank.cp_group.size())
        self.mtp_depths, self.mtp_weight, self.policy = objective.mtp_depths, objective.mtp_weight, objective.policy
        self.speech, self.distillation, self.retrieval = objective.speech, objective.distillation, objective.retrieval
        self.preference = objective.preference
        self.scores = bool(self.preference and self.preference.scores)  # of samples' last states

    def __call__(
        self,
        batches: Iterator[MicroBatchLike | Prepared],
        model: Callable[[ModelInputs], Tensor],
        *,
        loss_scale: Tensor | float,
        evaluate: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        """mcore's forward step: (model output, function from it to loss and metrics).

        `loss_scale` multiplies the sum of negative log likelihoods (see `zoo.training.trainer`). A micro-batch may come prepared.
        """
        batch = next(batches)
        ready = batch if isinstance(batch, Prepared) else Prepared(*self.prepare(batch, evaluate=evaluate))
        out = self.forward(model, ready.inputs)
        return out, lambda output: self.loss(output, ready.loss_inputs, loss_scale, evaluate)

    def prepare(
        self,
        batch: MicroBatchLike,
        *,
        evaluate: bool = False,
        logits: bool | Literal["last"] = False,
        logprobs: bool = False,
        entropy: bool | Literal["measured"] = False,
        temperature: float | Tensor = 1.0,
        experts: Tensor | Literal["noted"] | None = None,
    ) -> tuple[ModelInputs, LossInputs]:
        """All host stages: capture, pack, positions, place, shard.

        `evaluate`: also say whether each label was the most likely token; `logits`: of all tokens, or of each sample's last
        one, in the place of losses; `logprobs`: for `self.logprobs`, with `entropy` for `self.entropy` too, of logits
        divided by `temperature`, a number or (S,) of the samples. Multi-token prediction runs for training alone. `experts`:
        those of each token, (B, T0, L, k) int64, -1 where the router chooses, or that they are to be noted (`Routing`).
        """
        layout, batch = self.capture(batch), HostBatch.from_batch(batch)
        logits = "last" if self.scores or self.retrieval is not None else logits
        if logprobs and batch.labels is None:  # every real token is one to predict, as it came
            batch = replace(batch, labels=batch.input_ids)
        parts = self.pack(batch, layout)
        training = not (evaluate or logits or logprobs)
        if self.policy is not None and batch.policy is not None:  # of all its passes
            temperature, experts = self.policy.temperature, batch.policy.experts
            entropy = entropy or (training and (self.policy.entropy > 0 or "measured"))
        inputs, loss_inputs = self.shard(parts, batch.media, evaluate=evaluate, logits=logits, training=training)
        if isinstance(temperature, Tensor):
            temperature = self._move(temperature.float().cpu()[loss_inputs.label_segments])
        most = batch.most_tokens if self.cp_size == 1 else None  # whole samples make rows of other lengths
        inputs = replace(inputs, entropy=entropy, temperature=temperature, most_tokens=most)
        if training and self.distillation is not None:
            taught_at, source = self.distillation.temperature, loss_inputs.label_source
            inputs = replace(inputs, distillation=distillation_inputs(batch, source, taught_at, self._move))
        token_source = chosen = None
        if experts is not None:
            token_source = self._context_shard(parts).take(parts.source).T.reshape(-1)
            if isinstance(experts, Tensor):
                absent = token_source[:, None, None] < 0
                chosen = self._move(experts.flatten(0, 1)[token_source.clamp(min=0)].masked_fill(absent, -1))
            inputs = replace(inputs, routing=Routing(chosen))
        if batch.weights is not None:  # as the labels: padded (B, T0) or packed (1, T)
            flat, sources = batch.weights.float().flatten(), (loss_inputs.label_source, loss_inputs.ahead_source)
            of_labels, of_ahead = (self._move(flat[source]) for source in sources)
            loss_inputs = replace(loss_inputs, label_weights=of_labels, ahead_weights=of_ahead)
        return inputs, replace(
            loss_inputs,
            caller_shape=tuple(batch.input_ids.shape),
            filler=bool(batch.filler),
            token_source=token_source,
            reference=None if batch.reference is None else self._move(batch.reference.float()),
            desirable=None if batch.desirable is None else self._move(batch.desirable),
            kl=None if batch.kl is None else self._move(batch.kl),
            vectors=batch.vectors,
            policy=policy_inputs(batch.policy, loss_inputs, self._move) if training else None,
        )

    def capture(self, batch: MicroBatchLike) -> PackedLayout:
        """The layout of the micro-batch (`zoo.steps.batch.layout_of`); ValueError for a batch that contradicts itself."""
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
        whole: SampleLevelSplit | None = None
        if self.cp_size > 1 and self.flops is not None and self.packing.mode == "thd":
            most = max(layout.total, self.packing.budget)
            whole = split_by_samples(layout, self.cp_size, self.flops, most, self.packing.pad_to)
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

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        """Placeholders as many tokens as their media have embeddings; by default the processor has done so.

        A family whose processor may leave one token a medium calls `zoo.steps.media.expand_row` here.
        """
        return layout, ids, labels, source

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(A, 1, T) positions of the packed row (1, T), starting again in each segment. Plain by default."""
        return layout.positions[None]

    def bidirectional_tokens(self, ids: Tensor) -> Tensor | None:
        """(R, T) bool, the tokens whose spans attend to one another both ways; None: attention is causal. `ids`: (R, T)."""
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
        for name, tokens in self.tower_tokens().items():
            places = [((ids == token) & ~padding).nonzero(as_tuple=True) for token in tokens]
            flat = torch.cat([column * len(ids) + row for row, column in places])
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

        `evaluate` and `logits` as `prepare` has them; `training`: run the depths of multi-token prediction.
        """
        shard = self._context_shard(parts)
        streams = self.media_streams(media)
        check_media(streams, media, {name: len(placement.rows) for name, placement in parts.placements.items()})
        shares: dict[str, RankShare] = {}  # of each tower's media; none where each rank encodes all
        if self.media_group is not None and self.media_group.size() > 1:
            rank, size = self.media_group.rank(), self.media_group.size()
            device = self.device if self.encodes_media else torch.device("meta")  # needs no pixels
            shares = {name: rank_share(tower, media, rank, size, device) for name, tower in streams.items() if tower}
        if shares:
            media = {name: rows for share in shares.values() for name, rows in share.media.items()}
        sizes = {stream.sizes for of_tower in streams.values() for stream in of_tower}
        encoded = for_towers(media, self.tower_inputs(media), sizes, self.device) if self.encodes_media else {}
        mean = self.retrieval is not None and self.retrieval.pooling == "mean"
        labels = shard.last_tokens(every=mean) if logits == "last" else shard.labels()
        ahead, ahead_source = self._ahead(parts, shard, shares, self.mtp_depths if training else 0)
        seq_params = shard.seq_params(
            self.bidirectional_tokens(parts.input_ids), self.device, padded=self.packing.mode == "none"
        )
        inputs = ModelInputs(
            input_ids=self._move(shard.take(parts.input_ids)),
            positions=self._move(shard.positions()),
            padding_mask=self._move(shard.take(parts.padding_mask)) if bool(parts.padding_mask.any()) else None,
            seq_params=seq_params,
            media=encoded,
            placements=shard.placements(parts.placements, shares),
            shared={name: share.longest for name, share in shares.items()},
            label_rows=self._move(labels.rows) if not logits or logits == "last" else None,
            targets=None if logits else self._move(labels.targets),
            label_exchange=None if logits else labels.exchange,
            count_correct=evaluate,
            mtp=ahead,
        )
        segments, source = parts.segment_ids[labels.at], parts.source[labels.at]
        return inputs, LossInputs(segments, parts.layout.num_segments, source, (), ahead_source)

    def _context_shard(self, parts: Parts) -> ContextShard:
        """This context-parallel rank's tokens of a micro-batch."""
        padded = self.packing.mode == "none"
        row = PackedLayout.from_lengths([parts.input_ids.shape[1]]) if padded else parts.layout
        return ContextShard(parts, row, self.cp_group)

    def _ahead(
        self, parts: Parts, shard: ContextShard, shares: Mapping[str, RankShare], depths: int
    ) -> tuple[tuple[MTPInputs, ...], Tensor]:
        """What each depth of multi-token prediction reads and predicts, and (N',) the places of all depths' labels.

        `zoo.nn.decoder.mtp` shows by an example what a depth reads.
        """
        ahead, places = [], [torch.empty(0, dtype=torch.int64)]
        for depth in range(1, depths + 1):
            labels = shard.labels(depth + 1)
            ids, padding, placements = shard.successors(depth)
            moved = {"label_rows": self._move(labels.rows), "targets": self._move(labels.targets)}
            local = shard.placements(placements, shares)
            ahead.append(
                MTPInputs(self._move(ids), self._move(padding), local, **moved, label_exchange=labels.exchange)
            )
            places.append(parts.source[labels.at])
        return tuple(ahead), torch.cat(places)

    def _move(self, tensor: Tensor) -> Tensor:
        """A tensor on its way to the device."""
        if self.device.type == "cuda" and not tensor.is_cuda:
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def forward(self, model: Callable[[ModelInputs], Tensor], inputs: ModelInputs) -> Tensor:
        """The model's part of this pipeline stage."""
        return model(inputs)

    def loss(
        self, output: Tensor, loss_inputs: LossInputs, loss_scale: Tensor | float, evaluate: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over what this rank trains on, labels or answers, times `loss_scale`, and metrics for the log.

        `zoo.steps.losses` and `zoo.steps.objectives.policy` have the kinds of it, and say what their metrics are.
        """
        group = self.cp_group if self.cp_size > 1 else None
        if self.retrieval is not None:
            total, metrics = retrieval_loss(output, loss_inputs, group, counts=self.cp_rank == 0)
        elif self.preference is not None and not evaluate:
            values = -output if self.scores else output
            total, metrics = answer_loss(values, loss_inputs, self.preference, group, counts=self.cp_rank == 0)
        elif self.policy is not None and not evaluate:
            total, metrics = policy_loss(output, loss_inputs, self.policy, group)
        elif self.distillation is not None and not evaluate:
            total, metrics = distillation_loss(output, loss_inputs, self.distillation)
        else:
            if self.scores:  # as a log-probability, of one label that is never the most likely token
                output = torch.stack((-output, torch.zeros_like(output)))
            depths = 0 if evaluate else self.mtp_depths
            total, metrics = label_loss(output, loss_inputs, depths, self.mtp_weight, evaluate=evaluate)
        total = total * loss_scale
        if loss_inputs.filler:
            return total * 0.0, {name: torch.zeros_like(value) for name, value in metrics.items()}
        return total, metrics

    def logprobs(self, output: Tensor, loss_inputs: LossInputs) -> Tensor:
        """Log-probability of each token given those before it in its sample, in the caller's shape.

        `output` and `loss_inputs` of a batch that was prepared with `logprobs=True`, on the last pipeline stage. The result is
        (B, T0) fp32 ((1, T) for a packed batch), its entry at a token that token's own, and 0 where there is none: on
        padding, at a sample's first token and, where the batch has labels, at tokens without. Whole on every
        context-parallel rank, and differentiable.

        Every tensor and context parallel rank computes the same loss from these values; `zoo.steps.losses.sum_over_context`
        says how its gradient is scaled.
        """
        return self._for_caller(-(output if output.ndim == 1 else output[0]), loss_inputs)

    def entropy(self, output: Tensor, loss_inputs: LossInputs) -> Tensor:
        """Entropy in nats of what predicts each token, as `logprobs` is laid out; of a batch prepared with `entropy=True`."""
        return self._for_caller(output[1], loss_inputs)

    def _for_caller(self, values: Tensor, loss_inputs: LossInputs) -> Tensor:
        """(N,) of this rank's labels -> the caller's shape, with those of all context-parallel ranks."""
        shape, rows = loss_inputs.caller_shape, cpu_to_device(loss_inputs.label_source, values.device)
        flat = values.new_zeros(math.prod(shape)).index_copy(0, rows, values)
        return sum_over_context(flat, self.cp_group if self.cp_size > 1 else None).view(shape)
