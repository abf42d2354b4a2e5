"""Segment lengths as Python ints, checked, padded and expanded, and rows read off an attention mask, before any index is made.

Guarantees: a row of a mask is taken only when its real tokens are unbroken, so nothing is ever packed that the mask did not say. A 4-D
mask has two senses in use, True = attends (Hugging Face) and True = masked (Megatron); one that can't be what it is taken for is refused,
and so is one that can be either. Costs: a mask is read on the CPU, so one on a GPU costs one device sync: hand over a CPU tensor. A 4-D
mask also costs an O(B T^2) check.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Counts = Sequence[Sequence[tuple[int, int]]]  # (position in the segment, embeddings) of each placeholder
SENSES = (
    "In Hugging Face's sense True means that a query attends a key, in Megatron's that it is masked: "
    "pass masked_is_true=False for the former, True for the latter"
)


def as_ints(lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
    """The lengths as Python ints; TypeError for a tensor, or for a length that is not an integer."""
    if isinstance(lengths, Tensor):
        raise TypeError("lengths is a tensor; give host integers (`.tolist()`), so that no device sync hides here.")
    for segment, length in enumerate(lengths):
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise TypeError(f"Segment {segment} has length {length!r} ({type(length).__name__}); an int is wanted.")
    return tuple(int(length) for length in lengths)


def padded_lengths(lengths: Sequence[int], align: int, pad_to: int | None) -> tuple[int, ...]:
    """S lengths, each padded to a multiple of `align`; the last one also takes what is missing to `pad_to` in all.

    Raises:
        ValueError: no lengths, a length or `align` below 1, `pad_to` too small or not a multiple of `align`.
    """
    if not lengths:
        raise ValueError("No lengths were given: an empty batch can't be packed.")
    if align < 1:
        raise ValueError(f"align is {align}; it must be at least 1.")
    for segment, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"Segment {segment} has length {length}; drop it, every segment needs a real token.")
    padded = [-(-length // align) * align for length in lengths]
    if pad_to is not None:
        needed = sum(padded)
        if needed > pad_to:
            raise ValueError(
                f"The {len(lengths)} segments take {needed} tokens at align {align}, over pad_to "
                f"{pad_to}; raise pad_to, or plan bins with at most that budget and the same align."
            )
        if pad_to % align:
            raise ValueError(
                f"pad_to is {pad_to}, not a multiple of align {align}: the last segment takes up the "
                f"tail and must stay aligned; use {-(-pad_to // align) * align}."
            )
        padded[-1] += pad_to - needed
    return tuple(padded)


def expanded_lengths(lengths: Sequence[int], counts: Counts) -> list[int]:
    """S lengths after each listed placeholder became its number of embeddings.

    Raises:
        ValueError: the number of lists is not S, a position is outside its segment or listed twice, or a number of
            embeddings is below 1.
    """
    check_segments(lengths, counts)
    for segment, (media, length) in enumerate(zip(counts, lengths, strict=True)):
        seen: set[int] = set()
        for position, number in media:
            if not 0 <= position < length:
                raise ValueError(f"Segment {segment} has {length} tokens; it has no placeholder position {position}.")
            if number < 1:
                raise ValueError(
                    f"The placeholder at position {position} of segment {segment} has {number} embeddings; "
                    "at least 1 is wanted."
                )
            if position in seen:
                raise ValueError(f"Segment {segment} lists the placeholder position {position} twice.")
            seen.add(position)
    grown = [sum(number - 1 for _, number in media) for media in counts]
    return [length + extra for length, extra in zip(lengths, grown, strict=True)]


def check_segments(lengths: Sequence[int], counts: Sequence[Sequence[object]]) -> None:
    """Raise ValueError unless `counts` has one list for each segment."""
    if len(counts) != len(lengths):
        raise ValueError(f"counts has {len(counts)} lists for {len(lengths)} segments; give each segment one.")


def rows_from_mask(mask: Tensor, masked_is_true: bool | None = None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Lengths and starts of the rows of a mask.

    Args:
        mask: (B, T) bool or integer, True or 1 on real tokens; or (B, 1, T, T), True or 1 where query may
            attend key. In the 4-D form a token is real when its diagonal entry attends.
        masked_is_true: True: the other sense, True or 1 on padding, or where query may not attend key (Megatron's
            `attention_mask`, PyTorch's `key_padding_mask`). None: as False, but a 4-D mask that can be read in both
            senses is refused.

    Returns:
        (lengths, starts, width): B real lengths, B offsets of the first real token in its row, and T.

    Raises:
        TypeError: the mask is not bool or integer (an additive float mask, say).
        ValueError: wrong shape, no rows, a row without a real token, a hole inside a row, values other than 0
            and 1, a 4-D row that hides a real token from a later one or lets a query attend a key that is not real,
            or a 4-D mask that both senses fit (every query attends all of some keys, on one side of the row).
    """
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"The mask has dtype {mask.dtype}; a bool or integer mask is wanted, True or 1 on real tokens. "
            "Pass `mask == 0` for an additive mask."
        )
    mask_host = mask.detach().to("cpu")
    if mask_host.ndim == 4:
        real_BT = _diagonal(mask_host, masked_is_true)
    elif mask_host.ndim == 2:
        real_BT = _as_bool(mask_host) ^ bool(masked_is_true)
    else:
        raise ValueError(f"The mask has shape {tuple(mask.shape)}; (B, T) or (B, 1, T, T) is wanted.")
    rows, width = real_BT.shape
    if rows == 0:
        raise ValueError("The mask has no rows: an empty batch can't be packed.")
    count_B = _count(real_BT)
    _refuse(count_B == 0, f"has no real token: drop the row, or name the mask's sense. {SENSES}")
    first_B, last_B = real_BT[:, 0], real_BT[:, -1]
    edges_B = _count(real_BT[:, 1:] != real_BT[:, :-1]) + first_B + last_B
    _refuse(
        edges_B != 2,
        "has a hole: padding stands between its real tokens. Only left- and right-padded rows can be packed; "
        "a row that is packed already needs from_lengths",
    )
    if first_B.all():
        starts = (0,) * rows
    else:
        starts = tuple(real_BT.to(torch.uint8).argmax(dim=1).tolist())  # the first of equal values
    return tuple(count_B.tolist()), starts, width


def check_width(starts: Sequence[int], lengths: Sequence[int], width: int) -> None:
    """Raise ValueError, naming the first row that ends beyond a batch of `width` tokens."""
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start + length > width:
            raise ValueError(f"Row {row} ends at token {start + length}, beyond the batch width {width}.")


def _count(x_BT: Tensor) -> Tensor:
    """(B,) int32 number of True in each row; a third faster than the sum of a bool tensor."""
    return x_BT.view(torch.uint8).sum(dim=1, dtype=torch.int32)


def _refuse(bad_B: Tensor, reason: str) -> None:
    if bad_B.any():
        raise ValueError(f"Row {int(bad_B.nonzero()[0])} of the mask {reason}.")


def _as_bool(mask: Tensor) -> Tensor:
    """The mask as bool. Values other than 0 and 1 are refused: in some libraries they number packed segments."""
    if mask.dtype == torch.bool:
        return mask
    odd = (mask != 0) & (mask != 1)
    _refuse(odd.flatten(1).any(dim=1), "holds values other than 0 and 1")
    return mask == 1


def _diagonal(mask: Tensor, masked_is_true: bool | None) -> Tensor:
    """(B, T) real tokens of a (B, 1, T, T) mask that lets real tokens attend all real tokens before them."""
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        raise ValueError(f"The mask has shape {tuple(mask.shape)}; a 4-D mask must be (B, 1, T, T).")
    attend_BTT = _as_bool(mask)[:, 0] ^ bool(masked_is_true)
    real_BT = attend_BTT.diagonal(dim1=1, dim2=2)
    # A mask read upside down says that padding is real. Either a query then attends a key that is not real, or ...
    _refuse(
        (attend_BTT & ~real_BT[:, None, :]).flatten(1).any(dim=1),
        f"lets a query attend a key that is not real (by its diagonal entry). {SENSES}",
    )
    # A block-diagonal or windowed mask asks for something else than one causal segment per row: packing it as
    # one would change what the model computes, so it is an error rather than a guess.
    causal_BTT = (real_BT[:, :, None] & real_BT[:, None, :]).tril()
    _refuse(
        (causal_BTT & ~attend_BTT).flatten(1).any(dim=1),
        "hides a real token from a later real token (a windowed or already packed row); pass the (B, T) "
        "mask, or use from_lengths with the segments inside",
    )
    # ... every query attends all keys of one side, and the mask can be read both ways.
    if masked_is_true is None and len(mask) and _fits_both(attend_BTT, real_BT):
        raise ValueError(f"The mask can be read in both senses, with other lengths in each. {SENSES}.")
    return real_BT


def _fits_both(attend_BTT: Tensor, real_BT: Tensor) -> bool:
    """Whether the inverted mask is one, too, in every row."""
    if not real_BT.shape[1] or not (attend_BTT == real_BT[:, None, :]).all():
        return False
    one_side_B = (real_BT[:, 0] ^ real_BT[:, -1]) & (_count(real_BT[:, 1:] != real_BT[:, :-1]) == 1)
    return bool(one_side_B.all())
