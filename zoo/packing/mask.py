"""Row geometry from an attention mask: where each row's real tokens start and how many there are.

Guarantees: a row is taken only when its real tokens are one unbroken run, so nothing is ever packed that the
mask did not say. A 4-D mask has two senses in use, True = attends (Hugging Face) and True = masked (Megatron); one
that can't be what it is taken for is refused, and so is one that can be either. Costs: the mask is read on the host, so
a mask on a GPU costs one device sync: hand over a CPU tensor. A 4-D mask also costs an O(B T^2) check.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SENSES = (
    "In Hugging Face's sense True means that a query attends a key, in Megatron's that it is masked: "
    "pass masked_is_true=False for the former, True for the latter"
)


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
    """The mask as bool; other integers are refused: in some libraries they number packed segments."""
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
