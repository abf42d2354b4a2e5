"""What a sample costs: FLOPs of a forward pass from lengths that the host knows, by part of the model.

A multiplication and its addition count as two FLOPs, products of matrices alone are counted. Training takes three
times as many (the backward pass has two products for each of the forward pass), a part that is computed again in the
backward pass one time more; `train_factor` says it. A causal layer counts the pairs it needs, n (n + 1) / 2 of a sample of n
tokens, and no padding: kernels that skip neither do more. Tokens that an image's other tokens see ahead of them are not counted.

The numbers of an architecture come from `zoo.nn.flops.model_cost`; the arithmetic here takes a microsecond a sample, so
that a packer can weigh samples by it. What a layer sends to other ranks stands at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A row with more goes through the head, or under full recompute through an MLP, in chunks of so many, which keep their input alone.
LABELS_AT_ONCE, TOKENS_AT_ONCE = 8192, 16384
TALKER = "talker"  # its name among a model's parts, and that of a sample's frames among its media
NEARLY_ALL = 0.75  # of the ranks: tokens that have experts on so many go to all


class LayerKind(NamedTuple):
    """What a decoder layer is made of."""

    linear: bool  # Gated DeltaNet in the place of attention
    sparse: bool  # experts in the place of an MLP
    full: bool = False  # heads of layers that see all tokens, where a decoder has such of their own


class Projection(NamedTuple):
    """Linears that a token goes through."""

    weights: int
    kept: int  # numbers of a token that the backward pass reads


@dataclass(frozen=True)
class DecoderCost:
    """All decoder layers together, multi-token prediction's included."""

    per_token: float  # FLOPs of a token: projections, MLP, the experts it goes to, recurrent state
    per_pair: float  # FLOPs of a pair of tokens one of which attends to the other
    windows: Mapping[int, float] = field(default_factory=dict)  # the same of layers whose tokens see so many

    def flops(self, length: int) -> float:
        """Forward FLOPs of a sample of `length` tokens."""
        total = self.per_token * length + self.per_pair * length * (length + 1) / 2
        for window, per_pair in self.windows.items():
            seen = min(window, length)
            total += per_pair * (seen * (seen + 1) / 2 + (length - seen) * seen)
        return total


@dataclass(frozen=True)
class TowerCost:
    """An encoder of images, frames or clips. Its rows are those of the tensor it gets: patches, tiles, frames of sound."""

    per_row: float  # FLOPs of a row, with its share of what comes before and after the layers
    per_pair: float  # FLOPs of a pair of rows of which one attends to the other
    rows_per_token: float  # rows behind one embedding that the decoder gets
    window: int | None = None  # rows see one another within windows of so many; None: all of an item
    kept: float = 0.0  # numbers that are kept of a row for the backward pass, those of attention aside
    piece: int = 1  # rows that are taken at once: the last ones of an item are kept as if they were as many
    attended: float = 0.0  # queries of a row, over all layers; attention keeps them, keys, values and the result
    layers: int = 0  # that the host launches one by one
    ends: float = 0.0  # those of `kept` that are before and behind layers and mergers, which full recompute keeps too
    unkept: float = 0.0  # of a row at a forward pass's widest moment before the layers, where it keeps none

    def flops(self, rows: float) -> float:
        """Forward FLOPs of an item (an image, a frame of a video, a clip) of `rows` rows."""
        if self.window is None:
            return self.per_row * rows + self.per_pair * rows**2
        whole, rest = divmod(rows, self.window)
        return self.per_row * rows + self.per_pair * (whole * self.window**2 + rest**2)


@dataclass(frozen=True)
class TalkerCost:
    """A talker: a decoder over a sample's question and the frames of its answer, and what makes a frame's codes of its states."""

    decoder: DecoderCost  # with the projection of the thinker's embeddings
    per_frame: float  # FLOPs of a frame: logits of its first code, and all of its residual ones
    opening: int  # tokens between question and frames that are none of the sample's
    per_second: float  # frames

    def tokens(self, lengths: Sequence[int], labels: int, frames: Sequence[float]) -> list[int]:
        """Tokens of its sequences, of samples spoken in so many frames each; the answers, `labels` tokens in all, take no token of their own."""
        question = 1 - labels / max(sum(lengths), 1)
        return [round(length * question + self.opening + n) for length, n in zip(lengths, frames, strict=False)]

    def flops(self, lengths: Sequence[int], labels: int, frames: Sequence[float]) -> float:
        """Forward FLOPs; arguments as those of `tokens`."""
        return sum(map(self.decoder.flops, self.tokens(lengths, labels, frames))) + self.per_frame * sum(frames)


@dataclass(frozen=True)
class ModelCost:
    """A model: decoder, head, towers by name, and a talker where one is trained."""

    decoder: DecoderCost  # of a thinker that only its talker reads, the layers that come before
    head: float  # FLOPs of the logits of one label, over all depths of multi-token prediction
    towers: Mapping[str, TowerCost] = field(default_factory=dict)
    talker: TalkerCost | None = None

    def parts(
        self, lengths: Sequence[int], labels: int = 0, media: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, float]:
        """Forward FLOPs of a row by part: `decoder`, `head`, each tower's name, and `talker` where one is trained.

        Args:
            lengths: tokens of each sample, placeholders expanded.
            labels: tokens with a loss; logits of others are not computed.
            media: tower name -> rows of each item, as `MediaStream.rows` of zoo.steps has them; `talker` -> frames of each sample's speech.

        Raises:
            KeyError: the model has no such tower.
        """
        costs = {"decoder": sum(map(self.decoder.flops, lengths)), "head": self.head * labels}
        for name in self.towers:
            costs[name] = 0.0
        if self.talker is not None:
            costs[TALKER] = 0.0
        for name, items in (media or {}).items():
            if name == TALKER and self.talker is not None:
                costs[name] = self.talker.flops(lengths, labels, items)
            else:
                costs[name] += sum(map(self.towers[name].flops, items))
        return costs


def train_factor(*, frozen: bool = False, first: bool = False, recomputed: float = 0.0) -> float:
    """FLOPs of training over those of a forward pass.

    Args:
        frozen: the part's weights are not trained.
        first: nothing before the part is trained either, so that a frozen part has no backward pass at all.
        recomputed: share of the part that the backward pass computes again.
    """
    if frozen and first:
        return 1.0
    return (2.0 if frozen else 3.0) + recomputed


def ranks_sent_to(ranks: int, experts: int, topk: int) -> float:
    """The number of ranks that a token is sent to by even routing, of `ranks` that share `experts` out.

    A token goes to the ranks of its `topk` experts. If these are nearly all ranks, it goes to all, so that nothing that is sent depends on the
    choice of experts (`zoo.nn.decoder.experts.exchange`). A rank has none of its experts with the probability of `topk` draws without
    replacement from the other ranks' experts.
    """
    elsewhere = 1.0
    for taken in range(topk):
        elsewhere *= max(0.0, 1 - experts / ranks / (experts - taken))
    return float(ranks) if 1 - elsewhere >= NEARLY_ALL else ranks * (1 - elsewhere)
