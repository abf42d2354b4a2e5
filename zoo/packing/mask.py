"""Row geometry from an attention mask: where each row's real tokens start and how many there are.

Guarantees: a row is taken only when its real tokens are one unbroken run, so nothing is ever packed that the
mask did not say. Costs: the mask is read on the host, so a mask on a GPU costs one device sync: hand over a
CPU tensor. A 4-D mask also costs an O(B T^2) check.
"""

import torch
from torch import Tensor


def rows_from_mask(mask: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Lengths and starts of the rows of a mask.

    Args:
        mask: (B, T) bool or integer, True or 1 on real tokens; or (B, 1, T, T), True or 1 where query may
            attend key (Hugging Face's sense, the opposite of Megatron's `attention_mask`). In the 4-D form a
            token is real when its diagonal entry attends.

    Returns:
        (lengths, starts, width): B real lengths, B offsets of the first real token in its row, and T.

    Raises:
        TypeError: the mask is not bool or integer (an additive float mask, say).
        ValueError: wrong shape, no rows, a row without a real token, a hole inside a row, values other than 0
            and 1, or a 4-D row that hides a real token from a later one.
    """
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"The mask has dtype {mask.dtype}; a bool or integer mask is wanted, True or 1 on real tokens. "
            "Of an additive mask, pass `mask == 0`."
        )
    mask_host = mask.detach().to("cpu")
    if mask_host.ndim == 4:
        real_BT = _diagonal(mask_host)
    elif mask_host.ndim == 2:
        real_BT = _as_bool(mask_host)
    else:
        raise ValueError(f"The mask has shape {tuple(mask.shape)}; (B, T) or (B, 1, T, T) is wanted.")
    rows, width = real_BT.shape
    if rows == 0:
        raise ValueError("The mask has no rows: an empty batch can't be packed.")
    count_B = _count(real_BT)
    _refuse(
        count_B == 0,
        "has no real token; drop the row (or, if the mask is Megatron's, where True hides, invert it)",
    )
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


def _diagonal(mask: Tensor) -> Tensor:
    """(B, T) real tokens of a (B, 1, T, T) mask that lets real tokens attend all real tokens before them."""
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        raise ValueError(f"The mask has shape {tuple(mask.shape)}; a 4-D mask must be (B, 1, T, T).")
    attend_BTT = _as_bool(mask)[:, 0]
    real_BT = attend_BTT.diagonal(dim1=1, dim2=2)
    # A block-diagonal or windowed mask asks for something else than one causal segment per row: packing it as
    # one would change what the model computes, so it is an error rather than a guess.
    causal_BTT = (real_BT[:, :, None] & real_BT[:, None, :]).tril()
    _refuse(
        (causal_BTT & ~attend_BTT).flatten(1).any(dim=1),
        "hides a real token from a later real token (a windowed or already packed row); pass the (B, T) "
        "mask, or use from_lengths with the segments inside",
    )
    return real_BT
