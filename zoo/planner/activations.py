"""A packed row, and bytes of what its forward pass keeps for the backward pass, by layer and kind of kernel.

Read off what autograd saves in zoo's modules (a test holds it to that, tensor by tensor live on the CPU, within a
tenth). `fused` are the kernels of a GPU in half precision: attention without padding between samples, norms and SwiGLU that
keep their input alone, the delta rule without its chunks' matrices, the loss that overwrites the logits.

Per token, with h the hidden width, q and k the widths of queries and keys, f that of an MLP:

    attention    2 h before it, and q + (q + 2 k) as projected, q + k rotated, q that comes out
    MLP          2 h before it, and 5 f: both halves of the projection, the gate's input and value, the product
                 (fused 3 f: both halves and the product)
    experts      h + 6 f (3 f) for each expert of a token, and the router's logits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import TYPE_CHECKING

from zoo.config.entries import parse_entry
from zoo.config.schema import ParallelConfig, Recipe
from zoo.errors import UserError
from zoo.packing.cost import LABELS_AT_ONCE, TALKER, TOKENS_AT_ONCE, LayerKind, ModelCost, TowerCost, ranks_sent_to
from zoo.packing.moves import FEW, LONG
from zoo.types import JsonMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CHUNK = 64  # tokens of the delta rule that are worked on at once (zoo.nn.decoder.attention.gated_delta_net)
FP32 = 4
LABELS, MEDIA, SAMPLE, ITEM = 0.25, 0.5, 2048, 1024  # of a typical row
SPOKEN = 3.3  # tokens of text that are said in a second


@dataclass(frozen=True)
class Row:
    """A packed row: the samples of one micro-batch."""

    lengths: tuple[int, ...]  # tokens of its samples
    labels: int  # tokens with a loss
    media: Mapping[
        str, tuple[float, ...]
    ]  # tower name -> rows of each item; where a talker is trained its frames of each sample

    @cached_property
    def total(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of its longest sample."""
        return max(self.lengths, default=0)

    @cached_property
    def chunked(self) -> int:
        """Tokens of the row with each sample padded to whole chunks of the delta rule."""
        return sum(-(-length // CHUNK) * CHUNK for length in self.lengths)

    @cached_property
    def items(self) -> Mapping[str, Items]:
        """Tower name -> its media in numbers."""
        return {name: Items(rows) for name, rows in self.media.items()}

    def media_tokens(self, towers: Mapping[str, TowerCost]) -> float:
        """Embeddings that towers make of its media."""
        return sum(items.total / towers[name].rows_per_token for name, items in self.items.items() if name in towers)


@dataclass(frozen=True)
class Items:
    """The media of a row for one tower; a plan asks for their sums once for each of thousands of layouts."""

    rows: tuple[float, ...]

    @cached_property
    def total(self) -> float:
        """Sum of the rows of all items."""
        return sum(self.rows)

    @cached_property
    def longest(self) -> float:
        """Rows of the longest item."""
        return max(self.rows, default=0)

    @cached_property
    def _counts(self) -> Mapping[float, int]:
        return Counter(self.rows)

    def padded(self, piece: int) -> float:
        """Rows of all items, each padded to a multiple of `piece`."""
        return sum(-(-rows // piece) * piece * count for rows, count in self._counts.items())


def typical_row(
    recipe: Recipe, cost: ModelCost, labels: float = LABELS, media: float = MEDIA, frames: float | None = None
) -> Row:
    """A full row of a micro-batch: samples of 2048 tokens, in equal parts of each kind of media.

    Args:
        labels: share of the tokens that carry a loss.
        media: share of them that are of media, in items of at most 1024 tokens (a picture of a million pixels), or of
            as many as data.max_pixels gives.
        frames: of speech for each token that carries a loss, where a talker is trained; None: as many as `SPOKEN` makes.

    Raises:
        UserError: a share that is not from 0 to 1.
    """
    for name, share in (("labels", labels), ("media", media)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UserError(f"{name}={share!r}: wanted a share between 0 and 1")
    total = recipe.packing.budget * (recipe.train.micro_batch if recipe.packing.mode == "none" else 1)
    items = {}
    for name, tower in cost.towers.items():
        pieces = _pieces(int(total * media) // len(cost.towers), _item(recipe))
        items[name] = tuple(piece * tower.rows_per_token for piece in pieces)
    lengths = _pieces(total, min(SAMPLE, recipe.packing.budget))
    if cost.talker is not None:
        said = labels * (cost.talker.per_second / SPOKEN if frames is None else frames)
        items[TALKER] = tuple(max(1, round(length * said)) for length in lengths)
    return Row(lengths, round(total * labels), items)


def rows_of_step(recipe: Recipe, row: Row) -> float:
    """Rows that an optimizer step trains on: those of the batch, or in reinforcement learning as many as its answers fill."""
    rl, train = recipe.rl, recipe.train
    if rl.algorithm is None:
        return train.global_batch / train.micro_batch
    return max(1.0, train.global_batch * rl.samples / rl.updates / len(row.lengths))


def _item(recipe: Recipe) -> int:
    """Tokens of an image: of the largest that data.max_pixels, or an entry's own, allows."""
    entries = [parse_entry(spec, "data.train") for spec in recipe.data.train]
    pixel_limits = [entry.max_pixels or recipe.data.max_pixels for entry in entries]
    inner = recipe.model.arch.get("thinker_config")
    arch = inner if isinstance(inner, Mapping) else recipe.model.arch
    vision: JsonMapping = arch.get("vision_config") or {}
    if not vision.get("patch_size") or None in pixel_limits or not pixel_limits:
        return ITEM
    patch = vision["patch_size"]
    height, width = patch if isinstance(patch, list | tuple) else (patch, patch)
    merge = vision.get("spatial_merge_size") or 1 / (arch.get("downsample_ratio") or 1)
    return max(int(max(most or 0 for most in pixel_limits) // (height * width * merge**2)), 1)


def _pieces(total: int, size: int) -> tuple[int, ...]:
    return tuple([size] * (total // size) + ([total % size] if total % size else []))


def rows_sent(text: PretrainedConfig, parallel: ParallelConfig) -> float:
    """Ranks that get a token, once each; 0 where all experts are on every rank."""
    if parallel.ep * parallel.etp == 1:
        return 0.0
    return parallel.etp * ranks_sent_to(parallel.ep, text.num_experts, text.num_experts_per_tok)


def labels_in_chunks(recipe: Recipe, row: Row) -> bool:
    """Whether the logits of a row's labels are computed in chunks, and again in the backward pass."""
    return row.labels / recipe.parallel.cp > LABELS_AT_ONCE


def mlp_in_chunks(recipe: Recipe, row: Row) -> bool:
    """Whether a recomputed layer's MLP takes a row in chunks, of which each is recomputed once more."""
    engine, parallel = recipe.engine, recipe.parallel
    tokens = row.total / parallel.cp / (parallel.tp if parallel.sp else 1)
    scaled_at_once = engine.fp8 and engine.fp8_recipe == "tensorwise"
    return engine.recompute == "full" and tokens > TOKENS_AT_ONCE and not scaled_at_once


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that each layer keeps for the backward pass, of one recipe's row."""

    recipe: Recipe
    text: PretrainedConfig  # or its attributes; what a config lacks is None
    traits: Sequence[str]
    row: Row
    fused: bool
    part: str = "language"  # of the model, which is frozen or not; a talker's head takes its row whole

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return 2 if self.recipe.engine.precision == "bf16" else 4

    @property
    def tokens(self) -> float:
        """Tokens on a context parallel rank."""
        return self.row.total / self.recipe.parallel.cp

    @property
    def shared(self) -> float:
        """Tokens on a rank between attention and MLP: sequence parallelism shares them out."""
        return self.tokens / self.recipe.parallel.tp if self.recipe.parallel.sp else self.tokens

    @property
    def frozen(self) -> bool:
        """Whether the decoder's own weights are not trained."""
        return self.recipe.lora.rank > 0 or self.part in self.recipe.model.freeze

    def layer(self, kind: LayerKind) -> tuple[float, float]:
        """(bytes of the attention's half, bytes of the MLP's) of a layer of that kind."""
        mixing = self._linear_attention() if kind.linear else self._attention(kind.full)
        return mixing, self._experts() if kind.sparse else self._mlp(self.text.intermediate_size)

    def norm(self, count: float, width: float) -> float:
        """Bytes of the input of a norm, and without a kernel for it the normalised values, for a weight that is trained."""
        return count * width * (1 if self.fused else 2 - self.frozen) * self.size

    def _norms(self) -> float:
        """The norm before attention or MLP, and the one behind it where a family has both."""
        return (1 + ("sandwich_norms" in self.traits)) * self.norm(self.shared, self.text.hidden_size)

    def into_linear(self) -> float:
        """Bytes of a layer's input, which the first projection after a norm keeps too."""
        return self.shared * self.text.hidden_size * self.size

    def _attention(self, full: bool) -> float:
        text, parallel, size = self.text, self.recipe.parallel, self.size
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        groups, values = text.num_key_value_heads, 1
        if full:  # which has no values of its own
            head, groups, values = text.full_heads.width, text.full_heads.groups, 0
        queries = text.num_attention_heads * head / parallel.tp
        keys = max(groups, parallel.tp) * head / parallel.tp
        gated = "output_gate" in self.traits
        projected = (2 if gated else 1) * queries + (1 + values) * keys
        normed = "qk_norm" in self.traits
        # Without a kernel for packed rows values are copied apart, and nothing else holds on to what was projected.
        kept = self.tokens * size * projected if self.fused or normed else 0.0
        if normed and not self.fused:
            kept += self.tokens * size * queries  # a copy of the queries by head
            if not self.frozen:
                kept += self.tokens * size * (queries + keys)
        if gated:
            kept += self.tokens * queries * ((size if self.fused else FP32) + size)
        if self.fused:
            kept += self.tokens * size * (2 * queries + keys) + self.tokens * queries / head * FP32
            if parallel.cp > 1:  # keys and values of all ranks, and their prefixes of both chunks
                kept += 3 * self.row.total * 2 * keys * size
        else:
            # Segments side by side where that pays; many short ones by an index, which keeps the rows that it moves (zoo.packing.moves).
            samples, total = len(self.row.lengths), self.row.total
            side_by_side = samples * self.row.longest if samples * self.row.longest <= 2 * total else total
            kept += side_by_side / parallel.cp * size * 4 * queries + self.tokens * size * queries
            if 2 * samples > FEW and total < LONG * 2 * samples and samples * self.row.longest <= 2 * total:
                kept += self.tokens * size * (queries + keys + (0.0 if normed else projected))
        # What goes into the output projection is attention's result, which attention keeps, unless a gate has changed it.
        kept += self._dropped(text.hidden_size + (queries if gated else 0.0), 0.0 if gated else queries)
        return self._norms() + self.into_linear() + kept

    def _dropped(self, inputs: float, kept: float = 0.0) -> float:
        """Bytes that dropout and DoRA add at adapted linears with so many inputs a token: a copy of these, and a mask of a byte each.

        A linear that isn't trained doesn't keep the input; something else has `kept` values of it. DoRA keeps two outputs, at most 7 : 4 wide.
        """
        lora = self.recipe.lora
        directed = 3.5 * self.tokens * (inputs + kept) * self.size * lora.dora
        if not (lora.rank and lora.dropout and self.part in lora.parts):
            return directed if self.part in lora.parts else 0.0
        return directed + self.tokens * ((inputs + kept) * (self.size + 1) - inputs * self.size * self.fused)

    def _linear_attention(self) -> float:
        """Gated DeltaNet; context parallel ranks have a part of the heads of all tokens."""
        text, parallel, size = self.text, self.recipe.parallel, self.size
        key, value = text.linear_key_head_dim, text.linear_value_head_dim
        heads = text.linear_num_value_heads / parallel.tp
        keys, values = text.linear_num_key_heads * key / parallel.tp, heads * value
        convolved = 2 * keys + values
        inner = convolved + values + 2 * heads  # with gate, decay and beta
        if self.fused:
            # What was convolved, queries and keys of unit length, what is read, the gate by head, what goes on.
            rule = convolved + 2 * keys + heads * CHUNK + 3 * values
            kept = self.tokens * size * (inner + rule)
        else:
            whole = self.row.chunked / parallel.cp
            rule = heads * (6 * CHUNK + (key + value) + 4 * key + 3 * value)
            kept = self.tokens * size * (inner + (text.linear_conv_kernel_dim + 1) * convolved + 2 * keys + values)
            kept += whole * FP32 * rule + self.tokens * size * 5 * values
        kept += self._dropped(text.hidden_size + values)
        return self.norm(self.shared, text.hidden_size) + self.into_linear() + kept

    def _mlp(self, width: float) -> float:
        inner = self.tokens * self._swiglu * width / self.recipe.parallel.tp * self.size
        inner += self._dropped(self.text.hidden_size + width / self.recipe.parallel.tp)
        return self._norms() + self.into_linear() + inner * self._mlp_share

    @property
    def _mlp_share(self) -> float:
        """Share of the row that an MLP works on at once."""
        in_chunks = self.part != TALKER and mlp_in_chunks(self.recipe, self.row)
        return TOKENS_AT_ONCE / self.shared if in_chunks else 1.0

    @property
    def _swiglu(self) -> int:
        """Number of activations, each as wide as the MLP, that an MLP keeps for its backward pass."""
        return 3 if self.fused else 5

    def _experts(self) -> float:
        text, parallel, size = self.text, self.recipe.parallel, self.size
        routed = self.shared * text.num_experts_per_tok * parallel.etp  # an even share of them
        width = text.moe_intermediate_size / parallel.etp
        inner = self._swiglu + (not self.fused)  # and the product as it is before its probability
        kept = routed * (text.hidden_size + inner * width) * size + routed * 24
        kept += self.shared * text.num_experts * FP32
        shared = getattr(text, "shared_expert_intermediate_size", 0) or 0
        if shared:
            kept += self.tokens * self._swiglu * shared / parallel.tp * size + 2 * self.shared * text.hidden_size * size
        return self.norm(self.shared, text.hidden_size) + kept + (0 if shared else self.into_linear())

    def arrived(self) -> float:
        """Bytes of tokens that ranks with other experts sent, which selective recompute keeps to work on again."""
        return self.shared * rows_sent(self.text, self.recipe.parallel) * self.text.hidden_size * self.size

    def unused_rows(self) -> float:
        """Bytes that a layer's experts use under selective recompute beyond an even share of the tokens.

        The CPU doesn't wait for the router's choice (`zoo.nn.decoder.experts`), so memory is allocated for the most rows that can come.
        """
        text, parallel = self.text, self.recipe.parallel
        topk, local = text.num_experts_per_tok, text.num_experts // parallel.ep
        to_all = parallel.ep > 1 and ranks_sent_to(parallel.ep, text.num_experts, topk) == parallel.ep
        if not (to_all and self.fused and self.size == 2) or self.recipe.lora.rank:
            return 0.0
        rows = self.shared * parallel.etp * (parallel.ep * min(topk, local) - topk)
        return rows * (text.hidden_size + 3 * text.moe_intermediate_size / parallel.etp) * self.size

    def on_host(self, layers: int, towers: Mapping[str, TowerCost]) -> float:
        """Bytes of inputs of so many layers and of those of towers in host memory; pinned memory is given out in powers of two."""
        if not self.recipe.engine.offload_activations or self.recipe.engine.recompute != "full":
            return 0.0
        ranks = self.recipe.parallel.tp * self.recipe.parallel.cp
        inputs = [(layers, self.into_linear())]
        for name, tower in towers.items():
            if tower.layers:
                rows = self.row.items[name].padded(tower.piece) / ranks
                inputs.append((tower.layers, rows * tower.attended / tower.layers * self.size))
        return float(sum(count * 2 ** ceil(log2(size)) for count, size in inputs if size))

    def deepstack(self, layers: int) -> float:
        """Features of the vision tower that are added after the first layers."""
        patches = self.row.items["vision"].total if "vision" in self.row.items else 0.0
        return layers * patches / 4 * self.text.hidden_size * self.size

    def head(self) -> tuple[float, float]:
        """(bytes kept, further bytes while the loss is computed) of the logits of the row's labels."""
        labels = self.row.labels / self.recipe.parallel.cp
        if self.recipe.train.headless and self.part != TALKER:  # last states alone
            return self.norm(self.shared, self.text.hidden_size), 0.0
        most = labels if self.part == TALKER else min(labels, LABELS_AT_ONCE)
        logits = most * self.text.vocab_size / self.recipe.parallel.tp
        hidden = self.norm(self.shared, self.text.hidden_size) + labels * self.text.hidden_size * self.size
        # The gradient takes the place of the logits. Without a kernel the softmax in fp32 is kept; its gradient, and both in the model's
        # precision, come beside it.
        kept = logits * (self.size if self.fused else FP32)
        further = 0.0 if self.fused else logits * (FP32 + (self.size if self.size != FP32 else 0))
        return (hidden + kept, further) if labels <= most else (hidden, kept + further)

    def tower(self, cost: TowerCost, name: str) -> tuple[float, float]:
        """(bytes stored, further bytes in the backward pass) of a tower that sees its share of the row's media; ranks that share a row
        share its media. Under full recompute that are inputs of layers, and the widest layer.
        """
        parallel, items = self.recipe.parallel, self.row.items[name]
        rows, times = items.padded(cost.piece) / (parallel.tp * parallel.cp) * self.size, 4.0
        if not self.fused:
            count = len(items.rows)
            padded = count * items.longest / max(items.total, 1) if cost.window is None else 1.0
            moved = 5 if cost.per_pair and 2 * count > FEW and items.total < LONG * 2 * count else 0
            times = 1 + 4 * padded + moved
        kept = cost.kept + times * cost.attended
        if self.recipe.engine.recompute == "full" and cost.layers:
            inputs = 0.0 if self.recipe.engine.offload_activations else cost.attended
            return rows * (cost.ends + inputs), rows * 1.3 * (kept - cost.ends) / cost.layers
        return rows * kept, 0.0


def layers_bytes(kept: SavedActivations, layers: Sequence[LayerKind], recompute: str) -> tuple[float, float]:
    """(bytes stored, further bytes in the backward pass of the widest layer)."""
    counts = Counter(layers)
    halves, into = {kind: kept.layer(kind) for kind in counts}, kept.into_linear()
    if recompute == "full":
        widest = (mixing + (1.1 if kind.sparse else 1.3) * mlp for kind, (mixing, mlp) in halves.items())
        if kept.recipe.engine.offload_activations:  # the one that is worked on is on the GPU
            return 0.0, into + max(widest, default=0.0)
        return into * len(layers), max(widest, default=0.0)
    if recompute == "selective":
        norm = kept.norm(kept.shared, kept.text.hidden_size)
        arrived = {True: kept.arrived() if any(kind.sparse for kind in counts) else 0.0, False: 0.0}
        stored = sum(count * (halves[kind][0] + norm + into + arrived[kind.sparse]) for kind, count in counts.items())
        recomputed = (mlp - norm + (kept.unused_rows() if kind.sparse else 0.0) for kind, (_, mlp) in halves.items())
        return stored, max(recomputed, default=0.0) * 1.5
    stored = sum(count * sum(halves[kind]) for kind, count in counts.items())
    return stored, 0.25 * max((mlp for _, mlp in halves.values()), default=0.0)
