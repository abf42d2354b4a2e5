"""Micro-batches as a step reads them, and the layout of one: its loader's, or made of its lengths or its mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.nn.head import DistillationInputs, TopTokens
from zoo.packing import PackedLayout
from zoo.packing.lengths import as_ints, padded_lengths


class MicroBatchLike(Protocol):
    """The part of a micro-batch that a step reads; `zoo.data.sample.MicroBatch` is one, a foreign loop may bring its own.

    input_ids, labels: (B, T0) int64 padded, with `attention_mask` (B, T0); or (1, T) packed, with `lengths` or `layout`.
    labels are not shifted. media: tensors of all samples in order, concatenated along axis 0.

    A batch may also have `weights`, float weights of the labels in the loss, in the shape of the labels; `reference`, (S,)
    float32 log-probabilities of the samples' labels, for a preference loss (`zoo.steps.objectives.preference`); `desirable`, (S,) bool, with
    `kl`, () float32, for one of labelled answers; for distillation `teaching` of this rank's labels in order, or `taught` of all
    labels (`zoo.data.sample.TeacherLogits`); for reinforcement learning `policy`; for queries and candidates `vectors`; `most_tokens` and `filler` (`zoo.data.sample.MicroBatch`); and `masked_is_true`, the sense
    of its mask, as in `PackedLayout.from_mask`. Fields that say the same twice (lengths next to a mask, `cu_seqlens`, `layout`,
    `position_ids`) must agree.
    """

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor | None: ...

    @property
    def attention_mask(self) -> Tensor | None: ...

    @property
    def lengths(self) -> tuple[int, ...] | None: ...

    @property
    def media(self) -> Mapping[str, Tensor]: ...


class TaughtLike(Protocol):
    """A teacher's tokens for all labels of a batch, on the CPU; `zoo.data.sample.TeacherLogits` is one."""

    @property
    def ids(self) -> Tensor: ...  # (N, k) int32
    @property
    def logprobs(self) -> Tensor: ...  # (N, k) float32
    @property
    def rest(self) -> Tensor: ...  # (N,) float32
    @property
    def places(self) -> Tensor | None: ...  # (N,) int64, ascending, of the labels in the flattened batch


class PolicyLike(Protocol):
    """What reinforcement learning knows of a batch's labels; `zoo.data.sample.PolicyTokens` is one and says what it holds."""

    @property
    def advantages(self) -> Tensor: ...
    @property
    def rollout(self) -> Tensor: ...
    @property
    def old(self) -> Tensor | None: ...
    @property
    def reference(self) -> Tensor | None: ...
    @property
    def experts(self) -> Tensor | None: ...


class VectorGradientsLike(Protocol):
    """What a step's first pass found of queries and candidates; `zoo.data.sample.VectorGradients` is one and says what it holds."""

    @property
    def gradients(self) -> Tensor: ...
    @property
    def losses(self) -> Tensor: ...
    @property
    def right(self) -> Tensor: ...


@dataclass(frozen=True)
class PolicyInputs:
    """What the labels of a micro-batch have, on this rank: (N,) fp32 on its device, in order."""

    advantages: Tensor  # of each label's answer
    weights: Tensor  # see `zoo.steps.objectives.policy.label_weight`
    segments: Tensor  # (N,) int64, the segment of each label; an answer is one
    num_segments: int
    # The trainer's log-probabilities before the rollout's first update; None: this is the first.
    old: Tensor | None = None
    rollout: Tensor | None = None  # log-probabilities of the engine that drew the answers
    reference: Tensor | None = None  # of the reference model


# Fields that a batch may have, which `HostBatch` takes over unchanged.
OPTIONAL = (
    "position_ids", "reference", "desirable", "kl", "teaching", "taught", "policy", "vectors", "most_tokens", "filler",
)  # fmt: skip


@dataclass
class HostBatch:
    """A micro-batch whose ids, labels, mask and sizes of media lie in CPU memory."""

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    lengths: tuple[int, ...] | None
    media: Mapping[str, Tensor]
    weights: Tensor | None = None
    position_ids: Tensor | None = None
    reference: Tensor | None = None
    desirable: Tensor | None = None
    kl: Tensor | None = None
    teaching: DistillationInputs | None = None
    taught: TaughtLike | None = None
    policy: PolicyLike | None = None
    vectors: VectorGradientsLike | None = None
    most_tokens: int | None = None
    filler: bool | None = None

    @classmethod
    def from_batch(cls, batch: MicroBatchLike) -> HostBatch:
        """The batch as its loader made it; tensors that a foreign loop has on a GPU are copied (the CPU waits for them)."""
        labels, mask = batch.labels, batch.attention_mask
        weights = getattr(batch, "weights", None)
        return cls(
            batch.input_ids.cpu(),
            None if labels is None else labels.cpu(),
            None if mask is None else mask.cpu(),
            batch.lengths,
            {name: x if x.is_floating_point() else x.cpu() for name, x in batch.media.items()},
            None if weights is None else weights.cpu(),
            **{name: getattr(batch, name, None) for name in OPTIONAL},
        )


def layout_of(batch: MicroBatchLike, align: int, pad_to: int | None) -> PackedLayout:
    """The layout of a micro-batch: the one that came with a packed row, else of its lengths or its mask.

    Args:
        batch: packed or padded.
        align: each segment is padded to a multiple of this.
        pad_to: tokens of the packed row, or None.

    Raises:
        ValueError: the batch has none of the three (lengths are never guessed from labels or token ids), its layout is
            not that of its lengths under `align` and `pad_to`, or its input_ids have another shape.
    """
    stated = getattr(batch, "layout", None)
    if stated is not None and not isinstance(stated, PackedLayout):
        raise ValueError(f"the batch's layout is a {type(stated).__name__}; a zoo.packing.PackedLayout is wanted")
    if batch.attention_mask is not None:
        sense = getattr(batch, "masked_is_true", None)
        return PackedLayout.from_mask(batch.attention_mask, align, pad_to, masked_is_true=sense)
    if stated is not None:
        real = stated.lengths if batch.lengths is None else as_ints(batch.lengths)
        if stated.lengths != real:
            raise ValueError(f"the batch's layout has lengths {short(stated.lengths)}, its lengths are {short(real)}")
        padded = padded_lengths(real, align, pad_to)  # held against the step's padding without a tensor
        if stated.padded_lengths != padded:
            raise ValueError(
                f"the batch's layout has segments of {short(stated.padded_lengths)} tokens, the step's {short(padded)}; "
                "make it with the step's packing.align and packing.pad_to"
            )
        layout = stated.for_call(align, pad_to)
    elif batch.lengths is not None:
        layout = PackedLayout.from_lengths(batch.lengths, align, pad_to)
    else:
        raise ValueError(
            "the batch has neither lengths nor an attention_mask, so its samples can't be told apart; "
            "hand over one of them (labels and token ids are never used to guess)"
        )
    shape = tuple(batch.input_ids.shape)
    if shape not in ((1, layout.total), (1, layout.real_tokens)):
        raise ValueError(
            f"packed input_ids has shape {shape}, its lengths sum to {layout.real_tokens} (padded {layout.total}); "
            "(1, T) with T one of the two is wanted"
        )
    return layout


def distillation_inputs(
    batch: HostBatch, label_source: Tensor, temperature: float, move: Callable[[Tensor], Tensor]
) -> DistillationInputs | None:
    """What a teacher says of this rank's labels, which from disk are among those of the batch.

    Args:
        label_source: (N,) places of this rank's labels in the flattened batch.
        temperature: at which both distributions are compared.
        move: brings a tensor to the device.
    """
    taught = batch.taught
    if batch.teaching is not None or taught is None:
        return batch.teaching
    assert taught.places is not None
    rows = torch.searchsorted(taught.places, label_source)
    ids, values, rest = (move(x[rows]) for x in (taught.ids, taught.logprobs, taught.rest))
    return DistillationInputs(TopTokens(ids.long(), values, rest), temperature)


def short(values: tuple[int, ...] | list[int]) -> str:
    """Numbers in brackets, the first few where there are many."""
    text = ", ".join(str(value) for value in list(values)[:12])
    return f"({text}{', ...' if len(values) > 12 else ''})"
