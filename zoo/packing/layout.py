"""`PackedLayout`: all there is to know about one packed row, as an immutable value made from lengths that the CPU knows.

Guarantees: `pack` and `unpack` are inverse on real tokens and differentiable; the padding mask is True exactly on tokens the packer added;
nothing waits for a device, `from_mask` alone if its mask is on one.
Costs: O(T) integer work on the CPU for each index asked for, done once and kept with the layout (8 bytes a token for an int64 index): 0.1
to 0.2 ms each for 140,000 tokens in 64 segments, one core. `pack`, `unpack` and `cp_shard` on a CPU need none where segments are few or
long (`zoo.packing.moves`). On a GPU, also one asynchronous copy of each from pinned memory.

Shapes: S segments and T tokens of the packed row, B = S rows and width T0 of the padded batch.

Padding stands behind each segment: a causal layer looks only at the tokens before, so it can't change a real token and costs FLOPs only. The
router, the loss, multi-token prediction and metrics take it from `padding_mask`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.packing import index, moves
from zoo.packing.index import CPU, Memo, Name
from zoo.packing.lengths import as_ints, check_width, expanded_lengths, padded_lengths, rows_from_mask

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLayout:
    """Segments of one packed row, made by `from_lengths` or `from_mask`.

    Two layouts are equal (and hash alike) when they describe the same packed row: the same real and padded
    lengths. Where the rows came from, `align`, `pad_to` and `device` take no part.

    Attributes:
        lengths: S real segment lengths, in tokens, each at least 1.
        padded_lengths: S lengths with the packer's padding; their sum is `total`.
        align: every padded length is a multiple of this.
        pad_to: the static total that was asked for, or None.
        starts: S offsets of the first real token in its row of the padded batch (0 unless left-padded).
        width: T0 of the batch that the mask described, or None for a layout from lengths.
        device: where the tensor properties live; see `to`.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    align: int = dataclasses.field(default=1, compare=False)
    pad_to: int | None = dataclasses.field(default=None, compare=False)
    starts: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    width: int | None = dataclasses.field(default=None, compare=False)
    device: torch.device = dataclasses.field(default=CPU, compare=False)
    _memo: Memo = dataclasses.field(default_factory=Memo, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.starts:
            object.__setattr__(self, "starts", (0,) * len(self.lengths))

    def __reduce__(self) -> tuple[type[PackedLayout], tuple[object, ...]]:
        # Copies and pickles leave the tensors behind that were made from the lengths.
        fields = (self.lengths, self.padded_lengths, self.align, self.pad_to, self.starts, self.width)
        return type(self), (*fields, self.device)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], align: int = 1, pad_to: int | None = None) -> PackedLayout:
        """The layout of S samples laid end to end.

        Args:
            lengths: S real lengths, in tokens, each at least 1.
            align: each segment is padded up to a multiple of this (2 * cp under context parallelism, times tp
                with sequence parallelism).
            pad_to: static total T, a multiple of `align`, or None. The tail behind the last aligned segment is given to that
                segment's padding, so that `cu_seqlens_padded` ends at T and no kernel meets a segment without a real token.
                A kernel that ignores the real offsets pays for attention over that longer segment.

        Raises:
            TypeError: a length is not an integer.
            ValueError: no lengths, a length or `align` below 1, `pad_to` too small or not a multiple of `align`.
        """
        real = as_ints(lengths)
        return cls(real, padded_lengths(real, align, pad_to), align, pad_to)

    @classmethod
    def from_mask(
        cls, mask: Tensor, align: int = 1, pad_to: int | None = None, *, masked_is_true: bool | None = None
    ) -> PackedLayout:
        """The layout of a padded batch, which remembers each row's place for `pack` and `unpack`.

        Args:
            mask: (B, T0) bool or integer, True or 1 on real tokens; or (B, 1, T0, T0), True or 1 where query may attend key, a
                token being real when its diagonal entry attends. Rows may be padded on the left, the right or both. It is read
                on the CPU: hand over a CPU tensor, or pay one device sync.
            align: as in `from_lengths`.
            pad_to: as in `from_lengths`.
            masked_is_true: True for a mask of the other sense, True or 1 on padding, or where query may not attend key
                (Megatron's `attention_mask`). None is False, but refuses a 4-D mask that can be read in both senses.

        Raises:
            TypeError: a float mask.
            ValueError: as `from_lengths`, and whatever `zoo.packing.lengths.rows_from_mask` refuses, naming the row.
        """
        lengths, starts, width = rows_from_mask(mask, masked_is_true)
        return cls(lengths, padded_lengths(lengths, align, pad_to), align, pad_to, starts, width)

    def to(self, device: torch.device | str) -> PackedLayout:
        """The same layout, its tensor properties on `device`; copies to a GPU don't make the CPU wait."""
        device = torch.device(device)
        if device == torch.device("cuda"):
            device = torch.empty(0, device=device).device  # bare "cuda" is another device after set_device
        return dataclasses.replace(self, device=device)

    def for_call(self, align: int, pad_to: int | None) -> PackedLayout:
        """The same packed row on the CPU, for one call that keeps its tensors to itself; `align` and `pad_to` are those of `expand`."""
        return dataclasses.replace(self, align=align, pad_to=pad_to, device=CPU, _memo=self._memo.fork())

    def with_values(self, tensors: Mapping[str, Tensor], kept: Mapping[str, object]) -> PackedLayout:
        """The same lengths, but with these tensors by the names of properties, and these values by the names of `kept`."""
        memo = Memo()
        memo.static_shapes = True
        memo.tensors.update({(name, self.device): x for name, x in tensors.items()})
        memo.values.update({(name, self.device): x for name, x in kept.items()})
        return dataclasses.replace(self, _memo=memo)

    def refuse_static_shapes(self, operation: str) -> None:
        """RuntimeError from code that goes by lengths, where these are not the row's own (`with_values`)."""
        if self._memo.static_shapes:
            raise RuntimeError(
                f"{operation} goes by the lengths of segments, which differ from row to row; set engine.cuda_graphs=false"
            )

    def without_batch(self) -> PackedLayout:
        """The same packed row, of which `unpack` pads on the right alone, as a causal mask over segments side by side wants it."""
        if self.width is None and not any(self.starts):
            return self
        return dataclasses.replace(self, starts=(), width=None, _memo=Memo())

    @property
    def num_segments(self) -> int:
        """S, the number of segments."""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """T, tokens with padding."""
        return sum(self.padded_lengths)

    @property
    def real_tokens(self) -> int:
        """Tokens of the samples, padding excluded."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """The longest padded segment, in tokens."""
        return max(self.padded_lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """(S+1,) int32 cumulative real lengths, from 0 to `real_tokens`."""
        return self._tensor("cu_seqlens", lambda: index.offsets(self.lengths))

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """(S+1,) int32 offsets of the segments in the packed row, from 0 to `total`."""
        return self._tensor("cu_seqlens_padded", lambda: index.offsets(self.padded_lengths))

    @property
    def padding_mask(self) -> Tensor:
        """(1, T) bool, True exactly on tokens the packer added."""
        return self._tensor("padding_mask", lambda: index.padding(self.lengths, self.padded_lengths)[None])

    @property
    def segment_ids(self) -> Tensor:
        """(1, T) int64 segment index of each token, -1 on padding."""
        return self._tensor("segment_ids", lambda: index.segment_ids(self.lengths, self.padded_lengths)[None])

    @property
    def positions(self) -> Tensor:
        """(1, T) int64 index within the segment, 0 at each start. Padding counts on from its segment."""
        return self._tensor("positions", lambda: index.positions(self.padded_lengths)[None])

    @property
    def real_index(self) -> Tensor:
        """(real_tokens,) int64 packed positions of the real tokens, in order."""
        return self._tensor("real_index", lambda: index.ragged(self.lengths, index.starts(self.padded_lengths)))

    def pack(self, x: Tensor, fill: complex = 0, batch_dim: int = 0) -> Tensor:
        """Lay the real tokens of a padded batch end to end.

        Args:
            x: (B, T0, ...) with B = S, any dtype and device. T0 is the mask's width, or for a layout from
                lengths at least the longest length.
            fill: the value of padding tokens (an ignored label, say).
            batch_dim: where B stands; 1 for positions (3, B, T0).

        Returns:
            (1, T, ...) of the same dtype and device, differentiable in x; with `batch_dim`, (3, 1, T) and the like.

        Raises:
            ValueError: B or T0 disagrees with the layout.
        """
        if x.ndim < batch_dim + 2 or x.shape[batch_dim] != self.num_segments:
            raise ValueError(f"The batch has shape {tuple(x.shape)}; (B={self.num_segments}, T0, ...) is wanted.")
        width = x.shape[batch_dim + 1]
        if self.width is not None and width != self.width:
            raise ValueError(f"The batch is {width} tokens wide, but the layout's mask was {self.width}.")
        check_width(self.starts, self.lengths, width)
        flat = x.flatten(batch_dim, batch_dim + 1)
        slots = self.num_segments * width
        starts = self._row_starts(width), index.starts(self.padded_lengths)
        plan = self._memo.plan(
            ("pack", width), x.device, lambda: moves.plan_moves(*starts, self.lengths, slots, self.total)
        )
        if plan:
            return moves.move(flat, batch_dim, plan, fill).unsqueeze(batch_dim)
        layout = self.to(x.device)
        source = layout._slot_index(width)
        if self.real_tokens < self.total:  # padding is read from anywhere
            source = layout._tensor(
                ("source_index", width), lambda: self.to(CPU)._slot_index(width).clamp(max=slots - 1)
            )
        row = index.take(flat, batch_dim, source)
        if self.real_tokens < self.total:
            # Overwritten, not multiplied by a mask: what stood in the batch's padding (NaN too) can't reach the row,
            # nor what arrives at the row's padding a gradient.
            row.index_fill_(batch_dim, layout._pad_index, fill)
        return row.unsqueeze(batch_dim)

    def pack_list(self, samples: Sequence[Tensor], fill: complex = 0) -> Tensor:
        """Lay S ragged samples end to end.

        Args:
            samples: S tensors (L_i, ...) with L_i = lengths[i], of one dtype and device.
            fill: the value of padding tokens.

        Returns (1, T, ...), differentiable in every sample.

        Raises:
            ValueError: the number of samples or a sample's length disagrees with the layout.
        """
        if len(samples) != self.num_segments:
            raise ValueError(f"{len(samples)} samples were given to a layout of {self.num_segments} segments.")
        for segment, (sample, length) in enumerate(zip(samples, self.lengths, strict=True)):
            if sample.ndim < 1 or sample.shape[0] != length:
                raise ValueError(
                    f"Sample {segment} has shape {tuple(sample.shape)}; its segment wants ({length}, ...)."
                )
        real = torch.cat(list(samples))
        if self.real_tokens == self.total:
            return real[None]
        return index.put(real, 0, self.to(real.device).real_index, self.total, fill)[None]

    def unpack(self, y: Tensor, width: int | None = None, fill: complex = 0, batch_dim: int = 0) -> Tensor:
        """Put the real tokens of a packed row back into a padded batch: the inverse of `pack` on real tokens.

        Args:
            y: (1, T, ...), any dtype and device.
            width: T0 of the result; None is the mask's width, or the longest length for a layout from
                lengths. Rows stand where the mask had them; from lengths, they are right-padded.
            fill: the value outside the real tokens.
            batch_dim: where the 1 stands, and B in the result; 1 for positions (3, 1, T).

        Returns:
            (B, T0, ...) of the same dtype and device, differentiable in y.

        Raises:
            ValueError: y is not (1, T, ...) or a row does not fit the width.
        """
        if y.ndim < batch_dim + 2 or tuple(y.shape[batch_dim : batch_dim + 2]) != (1, self.total):
            raise ValueError(f"The packed row has shape {tuple(y.shape)}; (1, T={self.total}, ...) is wanted.")
        if width is None:
            width = max(self.lengths) if self.width is None else self.width
        check_width(self.starts, self.lengths, width)
        row, slots = y.squeeze(batch_dim), self.num_segments * width
        starts = index.starts(self.padded_lengths), self._row_starts(width)
        plan = self._memo.plan(
            ("unpack", width), y.device, lambda: moves.plan_moves(*starts, self.lengths, self.total, slots)
        )
        if plan:
            flat = moves.move(row, batch_dim, plan, fill)
        else:
            size = slots + (self.real_tokens < self.total)  # padding goes to one slot behind the batch
            flat = index.put(row, batch_dim, self.to(y.device)._slot_index(width), size, fill)
            flat = flat.narrow(batch_dim, 0, slots)
        return flat.unflatten(batch_dim, (self.num_segments, width))

    def cp_index(self, rank: int, size: int) -> Tensor:
        """(T/size,) int64 packed positions that one context-parallel rank holds, zigzag per segment.

        Use this one index for everything that has a token axis: `x.index_select(token_dim, index)`.

        Raises:
            ValueError: a padded length is not a multiple of 2 * size (named), or the rank is outside the group.
        """
        return self._tensor(("cp_index", rank, size), lambda: index.zigzag_index(self.padded_lengths, rank, size))

    def cp_shard(self, x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
        """`x.index_select(dim, self.cp_index(rank, size))`: what one context-parallel rank holds of x.

        On a CPU it is up to twenty times as fast where tokens are the last of several dimensions, as in positions (3, 1, T).

        Args:
            x: T tokens at `dim` (at least 0), any dtype and device.
            rank: of the context-parallel group.
            size: of that group.

        Raises:
            ValueError: as `cp_index`, or x does not have T tokens at `dim`.
        """
        if x.shape[dim] != self.total:
            raise ValueError(f"x has shape {tuple(x.shape)}; T={self.total} tokens are wanted at dimension {dim}.")
        plan = self._memo.plan(("cp", rank, size), x.device, lambda: index.zigzag_plan(self.padded_lengths, rank, size))
        if plan:
            return moves.move(x, dim, plan, 0)
        return index.take(x, dim, self.to(x.device).cp_index(rank, size))

    def cp_restore_index(self, size: int) -> Tensor:
        """(T,) int64 that puts shards, concatenated from rank 0 up, back in the order of the packed row.

        Raises:
            ValueError: a padded length is not a multiple of 2 * size (named).
        """
        return self._tensor(("cp_restore_index", size), lambda: index.restore_index(self.padded_lengths, size))

    def kept[T](self, name: Name, make: Callable[[], T]) -> T:
        """A value that follows from the row and the device alone, which every layer needs, made once. Don't write into its tensors."""
        return self._memo.value(name, self.device, make)

    def expand(self, counts: Sequence[Sequence[tuple[int, int]]]) -> PackedLayout:
        """The layout after placeholders became embeddings, with the same `align` and `pad_to`.

        Args:
            counts: for each segment, (position within the segment, number of embeddings) of each placeholder
                token. `zoo.packing.expand_index` also says where each new token comes from.

        Raises:
            ValueError: as `zoo.packing.expand_index`.
        """
        lengths = expanded_lengths(self.lengths, counts)
        return PackedLayout.from_lengths(lengths, self.align, self.pad_to).to(self.device)

    def packed_seq_params(
        self, cp_group: ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> PackedSeqParams:
        """Megatron-Core's carrier of the layout: offsets and lengths of the whole row, before the context-parallel split.

        Args:
            cp_group: context-parallel group that mcore should use for this call, or None for its own.
            device: where the offsets live; None is the layout's device.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        layout = self if device is None else self.to(device)
        known = {field.name for field in dataclasses.fields(PackedSeqParams)}
        further: dict[str, Tensor | bool] = {}
        if "pad_between_seqs" in known:
            further["pad_between_seqs"] = self.real_tokens < self.total
        if "seq_idx" in known:  # (1, T) int32 segment of each token, padding counted to its segment, as mcore has it
            segments = index.owner(self.padded_lengths).to(torch.int32)[None]
            further["seq_idx"] = index.cpu_to_device(segments, layout.device)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_kv=layout.cu_seqlens,
            cu_seqlens_q_padded=layout.cu_seqlens_padded,
            cu_seqlens_kv_padded=layout.cu_seqlens_padded,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            cp_group=cp_group,
            **further,
        )
        if "total_tokens" in known:
            # Set afterwards: given to the constructor of mcore 0.19.2, it makes __post_init__ rebuild seq_idx
            # with a repeat_interleave on the device, whose output size the CPU has to wait for.
            params.total_tokens = self.total
        return params

    def _tensor(self, name: Name, make: Callable[[], Tensor]) -> Tensor:
        return self._memo.tensor(name, self.device, make)

    def _row_starts(self, width: int) -> list[int]:
        """S positions of the rows' first real tokens in a flattened (B * width) batch."""
        return [row * width + start for row, start in enumerate(self.starts)]

    @property
    def _pad_index(self) -> Tensor:
        """(total - real_tokens,) int64 packed positions of the padding."""
        return self._tensor("pad_index", lambda: index.pads(self.lengths, self.padded_lengths))

    def _slot_index(self, width: int) -> Tensor:
        """(T,) int64: where each token goes in a flattened (B * width) batch; B * width for padding."""
        row_starts, pads = self._row_starts(width), self.to(CPU)._pad_index
        make = partial(index.slots, self.padded_lengths, row_starts, pads, self.num_segments * width)
        return self._tensor(("slot_index", width), make)
