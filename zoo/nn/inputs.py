"""What a multimodal model is built for and called with: its pipeline stage, rotary shape and one call's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.decoder.experts.router import Routing
from zoo.nn.head import (
    DistillationInputs,
    LabelExchange,
    TopK,
    TopTokens,
    at_temperature,
    cross_entropy,
    divergence,
    entropy,
    most_likely,
    top_tokens,
)
from zoo.packing import PackedLayout
from zoo.packing.index import cpu_to_device

type Media = Mapping[str, Any]
"""A batch's media by the names of the processor's tensors; of what the step worked out for towers, some values are ints."""


@dataclass(frozen=True)
class Vocabulary:
    """The embedding and the head of a model."""

    size: int  # tokens
    tied: bool = False  # embedding and head share their weight
    embedding_scale: float = 1.0  # factor of tokens' embeddings
    logit_softcap: float | None = None  # c of c tanh(logits / c)
    scores: bool = False  # a `score` of an answer's last state in the place of the vocabulary's head
    embeds: bool = False  # no head at all: the states themselves are wanted
    width: int | None = None  # of the embedding; None: the decoder's

    @property
    def headless(self) -> bool:
        """Whether there is no head of the vocabulary."""
        return self.scores or self.embeds


@dataclass(frozen=True)
class Stage:
    """Where a model chunk stands in the pipeline."""

    first: bool = True  # holds embedding and towers
    last: bool = True  # holds final norm, head and loss
    vp_stage: int | None = None  # index of the chunk on its rank, with an interleaved schedule
    towers_alone: bool = False  # neither embedding nor layers: a copy of the first stage's towers on another one


@dataclass(frozen=True)
class Placement:
    """Where embeddings of one tower go: embedding `source[i]` to row `rows[i]`, both (N,) int64 on the host."""

    rows: Tensor
    source: Tensor


@dataclass(frozen=True)
class Encoded:
    """What a tower made: (N, hidden) embeddings, and (N, hidden) deepstack features a decoder layer."""

    embeddings: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def joined(self) -> Tensor:
        """(N, hidden * (1 + layers)), side by side."""
        return torch.cat((self.embeddings, *self.deepstack), dim=-1)

    @classmethod
    def split(cls, joined: Tensor, width: int) -> Encoded:
        """What `joined` made, of embeddings of that width."""
        embeddings, *deepstack = joined.split(width, dim=-1)
        return cls(embeddings, tuple(deepstack))


@dataclass(frozen=True)
class MTPInputs:
    """What depth k of multi-token prediction reads and predicts on this rank; `zoo.nn.decoder.mtp` shows an example."""

    input_ids: Tensor  # (B, T) int64 ids of tokens t+k, 0 where there is none
    padding_mask: Tensor  # (B, T) bool, True on padding and where there is no token t+k
    placements: Mapping[str, Placement]  # tower name -> rows whose token t+k is of a medium
    label_rows: Tensor  # (M,) int64 rows whose token t+k+1 has a label
    targets: Tensor  # (N,) int64 that token, of each state after the exchange if there is one
    label_exchange: LabelExchange | None = None  # brings the states of label_rows to the ranks of their targets


@dataclass(frozen=True)
class ModelInputs:
    """One call's tensors on this rank, after packing and the context-parallel split."""

    input_ids: Tensor  # (B, T) int64, on the device
    positions: Tensor  # (A, B, T) positions, A axes
    padding_mask: Tensor | None  # (B, T) bool, True on padding; None where there is none
    seq_params: PackedSeqParams | None  # layout of the packed row; None for a padded batch
    # Media that this rank encodes, sizes on the host, and what `PackedStep.tower_inputs` worked out for their towers.
    media: Media = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)  # tower name -> where it goes
    shared: Mapping[str, int] = field(default_factory=dict)  # tower name -> most embeddings a rank makes
    # Tower name -> (N, hidden * (1 + deepstack layers)), which towers made of the media before; None: they are still to be encoded.
    encoded: Mapping[str, Tensor] | None = None
    label_rows: Tensor | None = None  # (M,) int64 rows that predict a label; None: all rows
    # (N,) int64 the token that each state should predict, after the exchange if there is one; None: logits.
    targets: Tensor | None = None
    label_exchange: LabelExchange | None = None  # brings the states of label_rows to the ranks of their targets
    count_correct: bool = False  # also say whether each target was the most likely token
    # The logits of targets are divided by it before anything else: a number, or (N,) on the device.
    temperature: float | Tensor = 1.0
    # Also the entropy of what predicts each target; "measured": without gradient, for which no copy of the logits is kept.
    entropy: bool | Literal["measured"] = False
    distillation: DistillationInputs | None = None  # of the targets: also the divergence from the teacher
    top: TopK | None = None  # the most likely tokens where targets stand, instead of losses
    routing: Routing | None = None  # experts of the decoder's tokens; None: routers choose, and nobody asks
    mtp: tuple[MTPInputs, ...] = ()  # what each depth of multi-token prediction reads and predicts
    # B T of the data-parallel rank that has most; None: ranks that exchange tokens of experts ask one another, for which the host waits.
    most_tokens: int | None = None

    def labels(self, rows: slice) -> ModelInputs:
        """With what belongs to these targets alone, where something does."""
        temperature, taught = self.temperature, self.distillation
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        if taught is not None:
            taught = taught._replace(tokens=TopTokens(*(x[rows] for x in taught.tokens)))
        return replace(self, temperature=temperature, distillation=taught)


def label_losses(logits: Tensor, targets: Tensor, inputs: ModelInputs | None, group: ProcessGroup) -> Tensor:
    """Negative log likelihoods (N,) fp32 of targets (N,) under logits (N, vocab/tp), and what else a call asks for.

    With `inputs` (2, N), the second row as `MultimodalModel.forward` says, or what `TopTokens.joined` gives.
    """
    second: Tensor | None = None
    if inputs is not None:
        if inputs.top is not None:
            return top_tokens(logits, *inputs.top, group).joined()
        logits = at_temperature(logits, inputs.temperature)
        if inputs.count_correct:
            second = most_likely(logits, group) == targets
        elif inputs.entropy:
            second = entropy(logits.detach() if inputs.entropy == "measured" else logits, group)
        elif inputs.distillation is not None:
            second = divergence(logits, inputs.distillation, group)
    loss = cross_entropy(logits, targets, group)
    return loss if second is None else torch.stack((loss, second.to(loss.dtype)))


def on_device_of(index: Tensor, like: Tensor) -> Tensor:
    """`index` on the device of `like`, copied from pinned memory: the host would wait for a copy from other memory."""
    return index if index.device == like.device else cpu_to_device(index, like.device)


def put_rows(hidden: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """hidden (T, B, C) with values (N, C) in the place of these rows of its T * B."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    return flat.index_copy(0, rows, values.to(flat.dtype)).view(hidden.shape)


def media_rows(placements: Mapping[str, Placement], encoded: Mapping[str, Encoded], like: Tensor) -> Tensor:
    """(N, hidden) embeddings in the order of the placements' rows, one tower after the other."""
    rows = [encoded[name].embeddings.index_select(0, on_device_of(p.source, like)) for name, p in placements.items()]
    return torch.cat(rows) if rows else like.new_zeros(0, like.shape[-1])


@dataclass(frozen=True)
class Speech:
    """The talker's packed row of T tokens, of S sequences with F frames in all, which reads N states; or a context-parallel rank's part of it.

    A frame is read by the row behind the one that predicts it, which may be another rank's: so ranks count frames twice. A rank that predicts
    none has one all the same, which nobody counts, and so has a rank without a label; `ends` and `segments` are of those that count.
    """

    layout: PackedLayout  # of the whole row
    positions: Tensor  # (3, 1, T) float32
    padding_mask: Tensor | None  # (1, T) bool; None where there is no padding
    text: Tensor  # (T,) int64 tokens of the thinker whose embeddings are read
    state_rows: Tensor  # (N,) int64 rows that read the thinker's state
    state_ids: Tensor  # (N,) int64 which of the whole row's states that is
    thinker_rows: Tensor  # (N,) int64 rows of the thinker whose states this rank holds
    held_ids: Tensor  # (N,) int64 which of the whole row's states these are
    media_rows: Tensor  # (M,) int64 rows that do not read the embedding
    code_rows: Tensor  # (C,) int64 rows with a first code
    codes: Tensor  # (C,) int64 that code
    input_rows: Tensor  # (F,) int64 rows that read a frame
    input_frames: Tensor  # (F, codebooks) int64 of these
    frame_rows: Tensor  # (F,) int64 rows whose states predict a frame
    frames: Tensor  # (F, codebooks) int64 of these
    label_rows: Tensor  # (F + S,) int64 rows that predict a first code, or the end
    targets: Tensor  # (F + S,) int64
    ends: Tensor  # (F + S,) bool on the host, whether it is the end
    segments: Tensor  # (F + S,) int64 on the host: the sequence of each of these
    states: int  # N of the whole row
    # (S, R) int64 tokens of the thinker that frames are read with which are still to be said, the last of each row PAD; None where none are.
    trailing: Tensor | None = None
    # (S, R) int64 rows of the thinker whose states are read with these, -1 for none; None: none are
    trailing_rows: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Tensor], device: torch.device) -> Speech:
        """The same on the device, but for `ends` and `segments`."""
        kept = ("ends", "segments")
        tensors: dict[str, Any] = {
            name: move(x) for name, x in vars(self).items() if isinstance(x, Tensor) and name not in kept
        }
        return replace(self, layout=self.layout.to(device), **tensors)

    def share(self, rank: int, size: int, local: Tensor) -> Speech:
        """The part of one of `size` context-parallel ranks, on the host: zigzag chunks of each sequence, and what belongs to them.

        local: (T',) int64 place of each token of the thinker's row among those that the rank holds, -1 for others.
        """
        index = self.layout.cp_index(rank, size)
        local_index = torch.full((self.layout.total,), -1)
        local_index[index] = torch.arange(len(index))
        parts: dict[str, Any] = {"text": self.text[index], "positions": self.positions[..., index]}
        if self.padding_mask is not None:
            parts["padding_mask"] = self.padding_mask[:, index]
        with_rows = {
            "state_rows": ("state_ids",), "media_rows": (), "code_rows": ("codes",), "input_rows": ("input_frames",),
            "frame_rows": ("frames",), "label_rows": ("targets", "ends", "segments"),
        }  # fmt: skip
        for name, others in with_rows.items():
            rows = local_index[getattr(self, name)]
            parts[name] = rows[rows >= 0]
            parts |= {other: getattr(self, other)[rows >= 0] for other in others}
        # The head and what predicts residual codes run on every rank: their gradients are waited for.
        idle = torch.zeros(1, dtype=torch.int64)
        if not len(parts["frame_rows"]):
            parts |= {"frame_rows": idle, "frames": idle.expand(1, self.frames.shape[1])}
        if not len(parts["label_rows"]):
            parts |= {"label_rows": idle, "targets": idle}
        thinker_rows = local[self.thinker_rows]
        held = thinker_rows >= 0
        return replace(self, **parts, thinker_rows=thinker_rows[held], held_ids=self.held_ids[held])


@dataclass(frozen=True)
class SpokenInputs(ModelInputs):
    """A call's tensors, with those of the talker where its losses are wanted."""

    speech: Speech | None = None
