"""Samples (one encoded row) and micro-batches (several samples, packed end to end or padded side by side)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zoo.packing import PackedLayout

if TYPE_CHECKING:
    from zoo.data.media.sizes import Fit

IGNORE = -100  # label of a token without loss, torch.nn.functional.cross_entropy's default


class TeacherLogits(NamedTuple):
    """A teacher's logits, from disk, of N labels in order: its k most likely tokens, and all others as one outcome.

    ids (N, k) int32, logprobs (N, k) float32, rest (N,) float32; of a micro-batch also places (N,) int64, ascending, of the labels
    in the flattened `labels`.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor
    places: Tensor | None = None


class PolicyTokens(NamedTuple):
    """What reinforcement learning knows of the labels of a micro-batch, in the shape of its labels.

    advantages, and natural log-probabilities under the rollout's temperature: rollout, by the engine that drew the answers; old, by
    the trainer before the rollout's first update, None where this is it; reference, by the reference model. All float32.
    experts: (B, T0, L, k) int64 that the rollout's tokens took, -1 where that is not known; None: routers choose.
    """

    advantages: Tensor
    rollout: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """One encoded row.

    Attributes:
        input_ids: (L,) int64 token ids, placeholders already expanded to one token per embedding.
        labels: (L,) int64, `input_ids` where there is loss and IGNORE elsewhere; not shifted.
        media: tensors of the family's towers; those of several samples are joined along dim 0.
        kind: the row's label for statistics.
        source: where the row stands.
        weights: (L,) float32 weight of each label in the loss; None where all are 1. A label of weight 0 is IGNORE.
        fit: as `zoo.data.media.sizes.SampleSize` has it.
        rejected: of a preference pair, whose better answer this is, the sample of the other one.
        reference: of a pair, a reference model's log-probabilities of the labels of both; of a labelled answer, of its own and of
            `mismatched`.
        desirable: of a labelled answer, whether it is.
        mismatched: of a labelled answer, the same conversation with the answer of another row.
        taught: a teacher's logits of the labels, from disk.
        candidates: of a row of retrieval, whose query this is: the samples of its positive, then of its negatives.
        key: of a query or candidate, 63 bits that tell its content from others.
        codes: of a spoken row, the first codes that a talker learns of it, and its end: these are its labels then. 0: it is not spoken.
        code_weight: weight of each of them in the loss.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, Tensor] = field(default_factory=dict)
    kind: str | None = None
    source: str = ""
    weights: Tensor | None = None
    fit: Fit | None = None
    rejected: Sample | None = None
    reference: tuple[float, float] | None = None
    desirable: bool | None = None
    mismatched: Sample | None = None
    candidates: tuple[Sample, ...] = ()
    key: int = 0
    taught: TeacherLogits | None = None
    codes: int = 0
    code_weight: float = 1.0

    @property
    def length(self) -> int:
        """L, tokens of the sample."""
        return self.input_ids.shape[0]

    @property
    def num_labels(self) -> int:
        """Tokens with loss, or codes, or the one query; the first token of a sample is nobody's target."""
        if self.key:
            return len(self.candidates[:1])
        return self.codes or int((self.labels[1:] != IGNORE).sum())

    @property
    def label_weight(self) -> float:
        """Sum of the weights of the tokens with loss, or of codes: their number where all weigh 1."""
        if self.codes:
            return self.codes * self.code_weight
        if self.weights is None:
            return float(self.num_labels)
        return float(self.weights[1:].double()[self.labels[1:] != IGNORE].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [self.input_ids, self.labels, *self.media.values(), *([] if self.weights is None else [self.weights])]
        others = (self.rejected, self.mismatched, *self.candidates)
        return sum(x.nbytes for x in tensors) + sum(other.nbytes for other in others if other is not None)

    @property
    def segments(self) -> tuple[Sample, ...]:
        """What lies in the packed row, in order: the sample, or both of a pair, or a query and its candidates."""
        if self.candidates:
            return (self, *self.candidates)
        return (self,) if self.rejected is None else (self, self.rejected)


class RetrievalKeys(NamedTuple):
    """What the S segments of a micro-batch are: keys (S,) int64 of their contents, and roles (S,) int64: QUERY, POSITIVE, NEGATIVE.

    A query stands before its positive, and its negatives behind that. Both lie on the host.
    """

    keys: Tensor
    roles: Tensor


QUERY, POSITIVE, NEGATIVE = range(3)  # roles


class VectorGradients(NamedTuple):
    """The loss of a step as its first pass found it: on the device, of a micro-batch's S segments and Q queries.

    gradients (S, hidden) fp32 of the sum of all queries' losses by the states' pooled sums; losses (Q,) and right (Q,) fp32: whether a
    query's positive is nearer than all else.
    """

    gradients: Tensor
    losses: Tensor
    right: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass gets: T tokens of a packed row, or B rows of width T0.

    Attributes:
        input_ids: (1, T) int64 packed, or (B, T0) int64 right-padded.
        labels: as `input_ids`, IGNORE where there is no loss; not shifted.
        attention_mask: (B, T0) bool, True on real tokens; None for a packed row.
        lengths: real tokens of each sample, on the host.
        media: the samples' media, joined along dim 0 in order.
        kinds: each sample's kind.
        sources: where each sample's row stands.
        num_labels: tokens with loss (targets; see `Sample.num_labels`), on the host.
        layout: layout of the packed row; None for a padded batch.
        weights: as `labels`, float32, the weight of each label in the loss; None where all are 1.
        label_weight: what the step's loss is divided by, on the host: of preference pairs their number, else the sum of the
            weights of the targets, of labelled answers theirs; None where it is `num_labels`.
        reference: (S,) float32, of pairs a reference model's log-probability of each sample's labels; of labelled answers (2 S,),
            with those of `mismatched` by turns, until `kl` is there.
        desirable: (S,) bool on the host, whether each labelled answer is.
        mismatched: of labelled answers, the micro-batch of the same conversations with other answers.
        kl: () float32, of labelled answers the divergence from the reference over the whole step.
        step_weight: sum of `loss_weight` over the step's micro-batches on all data-parallel ranks; None where the host doesn't know it.
        most_tokens: `total` of the largest among the micro-batches that data-parallel ranks train on at the same time; None where the host doesn't know it.
        teaching: what a teacher says of this rank's labels (`zoo.nn.head.DistillationInputs`).
        drift: (S,) float32, how much more likely each mismatched answer has become, of which `kl` is the mean.
        taught: a teacher's logits of all labels, from disk, on the CPU.
        policy: of sampled answers, what reinforcement learning knows of the labels.
        retrieval: of queries and candidates, which each segment is.
        vectors: of these, what the first pass of a step found.
        filler: it only keeps a rank without rows in step with the others: nothing of it counts, and it has neither `sources` nor `kinds`.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    lengths: tuple[int, ...]
    media: dict[str, Tensor]
    kinds: tuple[str | None, ...]
    sources: tuple[str, ...]
    num_labels: int
    layout: PackedLayout | None = None
    weights: Tensor | None = None
    label_weight: float | None = None
    reference: Tensor | None = None
    desirable: Tensor | None = None
    mismatched: MicroBatch | None = None
    kl: Tensor | None = None
    drift: Tensor | None = None
    retrieval: RetrievalKeys | None = None
    vectors: VectorGradients | None = None
    teaching: Any = None
    taught: TeacherLogits | None = None
    policy: PolicyTokens | None = None
    step_weight: float | None = None
    most_tokens: int | None = None
    filler: bool = False

    @property
    def starts(self) -> list[int]:
        """Where each sample's tokens begin in the flattened batch."""
        if self.layout is None:
            return [row * self.input_ids.shape[1] for row in range(len(self.lengths))]
        return list(itertools.accumulate(self.layout.padded_lengths, initial=0))[: len(self.lengths)]

    @property
    def loss_weight(self) -> float:
        """This micro-batch's share of what the step's loss is divided by."""
        if self.filler:
            return 0
        return self.num_labels if self.label_weight is None else self.label_weight

    @property
    def real_tokens(self) -> int:
        """Tokens of the samples, padding excluded."""
        return 0 if self.filler else sum(self.lengths)

    @property
    def total(self) -> int:
        """Tokens of the batch, padding included."""
        return self.input_ids.numel()

    def pin(self) -> MicroBatch:
        """The same batch in pinned memory, from which copies to a GPU don't wait; itself where there is no GPU."""
        return self._moved(Tensor.pin_memory) if torch.cuda.is_available() else self

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on `device`; copies from pinned memory don't make the host wait."""
        moved = self._moved(lambda tensor: tensor.to(device, non_blocking=True))
        return moved if moved.layout is None else replace(moved, layout=moved.layout.to(device))

    def _moved(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            attention_mask=None if self.attention_mask is None else move(self.attention_mask),
            media={name: move(tensor) for name, tensor in self.media.items()},
        )


def collate(samples: Sequence[Sample], layout: PackedLayout, pad_id: int = 0, *, pinned: bool = False) -> MicroBatch:
    """The samples laid end to end as one packed row.

    Args:
        samples: S samples of the layout's lengths.
        layout: `PackedLayout.from_lengths([sample.length ...], align, pad_to)`.
        pad_id: token id of the padding; not that of a placeholder.
        pinned: join media in pinned memory, which saves `MicroBatch.pin` a copy of them.

    Raises:
        ValueError: the samples' number or lengths disagree with the layout.
    """
    weights = _weights(samples)
    return MicroBatch(
        input_ids=layout.pack_list([sample.input_ids for sample in samples], fill=pad_id),
        labels=layout.pack_list([sample.labels for sample in samples], fill=IGNORE),
        attention_mask=None,
        layout=layout,
        weights=None if weights is None else layout.pack_list(weights, fill=0),
        **_common(samples, pinned),
    )


def collate_padded(
    samples: Sequence[Sample], align: int = 1, pad_to: int | None = None, pad_id: int = 0, *, pinned: bool = False
) -> MicroBatch:
    """At least one sample, side by side, right-padded to `pad_to` or to the longest one's multiple of `align`; else as `collate`.

    Raises:
        ValueError: a sample is longer than `pad_to`, or `pad_to` is not a multiple of `align`.
    """
    longest = max(sample.length for sample in samples)
    width = pad_to if pad_to is not None else -(-longest // align) * align
    if width < longest or width % align:
        raise ValueError(f"packing.pad_to is {pad_to}; a multiple of {align} that holds {longest} tokens is wanted.")

    def padded(rows: Sequence[Tensor], fill: float) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=fill) for row in rows])

    weights = _weights(samples)
    return MicroBatch(
        input_ids=padded([sample.input_ids for sample in samples], pad_id),
        labels=padded([sample.labels for sample in samples], IGNORE),
        attention_mask=padded([torch.ones(sample.length, dtype=torch.bool) for sample in samples], False),
        weights=None if weights is None else padded(weights, 0),
        **_common(samples, pinned),
    )


def with_preferences(batch: MicroBatch, samples: Sequence[Sample]) -> MicroBatch:
    """The micro-batch of the segments of `samples`, with labels and a reference's log-probabilities of pairs or labelled answers."""
    pairs = [s for s in samples if s.rejected is not None or s.desirable is not None]
    if not pairs:
        return batch
    if pairs[0].desirable is not None:
        batch = replace(batch, desirable=torch.tensor([sample.desirable for sample in pairs]))
    known = [sample.reference for sample in pairs if sample.reference is not None]
    reference = torch.tensor(known).flatten() if len(known) == len(pairs) else None
    return replace(batch, label_weight=float(len(pairs)), weights=None, reference=reference)


def with_retrieval(batch: MicroBatch, samples: Sequence[Sample]) -> MicroBatch:
    """The micro-batch of the segments of `samples`, with what they are where these are queries with candidates."""
    if not any(sample.candidates for sample in samples):
        return batch
    keys = [segment.key for sample in samples for segment in sample.segments]
    roles = [[QUERY, POSITIVE, *[NEGATIVE] * (len(sample.candidates) - 1)] for sample in samples]
    retrieval = RetrievalKeys(torch.tensor(keys), torch.tensor([role for each in roles for role in each]))
    return replace(batch, label_weight=float(len(samples)), weights=None, retrieval=retrieval)


def with_teacher_logits(batch: MicroBatch, samples: Sequence[Sample]) -> MicroBatch:
    """The micro-batch of `samples` with the logits of a teacher on disk, where they have them."""
    taught = [sample.taught for sample in samples if sample.taught is not None]
    if not taught:
        return batch
    places = [
        (sample.labels[1:] != IGNORE).nonzero()[:, 0] + start + 1
        for sample, start in zip(samples, batch.starts, strict=True)
    ]
    ids, logprobs, rest = (torch.cat(parts) for parts in list(zip(*taught, strict=True))[:3])
    return replace(batch, taught=TeacherLogits(ids, logprobs, rest, torch.cat(places)))


def _weights(samples: Sequence[Sample]) -> list[Tensor] | None:
    """The weights of each sample's labels; None where all are 1."""
    if all(sample.weights is None for sample in samples):
        return None
    return [torch.ones(s.length) if s.weights is None else s.weights for s in samples]


def _joined(parts: list[Tensor], pinned: bool) -> Tensor:
    if not pinned:
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


def _common(samples: Sequence[Sample], pinned: bool) -> dict:
    names = dict.fromkeys(name for sample in samples for name in sample.media)
    weighted = any(sample.weights is not None or sample.code_weight != 1 for sample in samples)
    return {
        "lengths": tuple(sample.length for sample in samples),
        "media": {name: _joined([s.media[name] for s in samples if name in s.media], pinned) for name in names},
        "kinds": tuple(sample.kind for sample in samples),
        "sources": tuple(sample.source for sample in samples),
        "num_labels": sum(sample.num_labels for sample in samples),
        "label_weight": sum(sample.label_weight for sample in samples) if weighted else None,
    }
