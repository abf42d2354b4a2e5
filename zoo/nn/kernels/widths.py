"""Which widths each kernel takes, asked before it is called: one function a kernel, on numbers alone.

What a kernel can't take goes another way, which is right and may be slow: plain PyTorch, or the torch backend where `auto`
chooses. Widths are numbers of elements in half precision, where 8 make the 16 bytes that rows must be a multiple of.
"""

from __future__ import annotations

from collections.abc import Iterable

ROW = 8  # elements of half precision in 16 bytes
# Width of heads -> that at which FlashAttention 4 takes them, where it was checked, forward and gradients. At 72 and 80 themselves
# its release 4.0.0b36 gives wrong gradients of queries (relative error 1.4, H200): they are padded with zeros.
FLASH4_WIDTHS = {64: 64, 72: 96, 80: 96, 96: 96, 128: 128, 256: 256}
# The widest head whose gradients Transformer Engine's fused attention has been seen to get right in packed rows. At 256
# they are wrong by 0.2 to 1e5 times their size, the output being right (TE 2.20.2, cuDNN 9.14, H200): `zoo doctor
# --known-wrong` tries it.
TE_WIDEST_HEAD = 128
QUACK_NARROWEST = 128  # a tile has 128 rows and 256 columns
FLA_WIDEST_HEAD = 256  # flash-linear-attention, `chunk_gated_delta_rule_fwd_h`


def _rows(*widths: int) -> bool:
    return all(width > 0 and width % ROW == 0 for width in widths)


def flash_takes(head: int) -> bool:
    """PyTorch's varlen flash attention, heads of this width."""
    return _rows(head) and head <= 256


def flash4_width(head: int) -> int | None:
    """The width to which heads of this one are padded for FlashAttention 4; None where it does not take them."""
    return FLASH4_WIDTHS.get(head)


def te_attention_takes(head: int) -> bool:
    """Whether Transformer Engine's attention takes heads of this width in packed rows."""
    return _rows(head) and head <= TE_WIDEST_HEAD


def te_linears_take(widths: Iterable[int]) -> bool:
    """Transformer Engine's linears in half precision, inputs and outputs of these widths."""
    return _rows(*widths)


def grouped_takes(*widths: int) -> bool:
    """`grouped_mm` and its gradients, inputs and outputs of these widths: "strides should be multiple of 16 bytes"."""
    return _rows(*widths)


def quack_takes(*widths: int) -> bool:
    """QuACK's grouped products and their gradients, inputs and outputs of these widths: a tile would be nearly empty in narrower ones."""
    return _rows(*widths) and min(widths) >= QUACK_NARROWEST


def fla_takes(key: int, value: int) -> bool:
    """flash-linear-attention's gated delta rule, heads of these widths."""
    return _rows(key, value) and max(key, value) <= FLA_WIDEST_HEAD
