"""Rotary embedding of heads by explicit angles (arXiv 2104.09864), in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.kernels.launch import power_of_2


@triton.jit
def _rotate(
    x, cos, sin, out, x_token, x_head, out_token, out_head, HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    ROTATED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    """Heads below ROTATED are turned, the others copied."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS)[:, None] & (half < TURNED // 2)[None, :]
    source = x + token * x_token + head[:, None] * x_head
    target = out + token * out_token + head[:, None] * out_head
    first = tl.load(source + half[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + TURNED // 2 + half[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * TURNED + half, mask=half < TURNED // 2, other=0.0).to(tl.float32)[None, :]
    s = (
        tl.load(sin + token * TURNED + half, mask=half < TURNED // 2, other=0.0).to(tl.float32)[None, :]
        * SIGN
    )
    turned = (head < ROTATED)[:, None]
    new_first = tl.where(turned, first * c - second * s, first)
    new_second = tl.where(turned, second * c + first * s, second)
    tl.store(target + half[None, :], new_first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + TURNED // 2 + half[None, :], new_second.to(out.dtype.element_ty), mask=inside)
    if TURNED < WIDTH:
        rest = TURNED + tl.arange(0, BLOCK_REST)
        there = (head < HEADS)[:, None] & (rest < WIDTH)[None, :]
        passed = tl.load(source + rest[None, :], mask=there, other=0.0)
        tl.store(target + rest[None, :], passed, mask=there)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int, rotated: int) -> None:
    """x and out (T, H, D) of any strides, cos and sin (T, R)."""
    tokens, heads, width = x.shape
    turned = cos.shape[-1]
    _rotate[(tokens,)](
        x, cos, sin, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), HEADS=heads, WIDTH=width,
        TURNED=turned, ROTATED=rotated, BLOCK_HEADS=power_of_2(heads),
        BLOCK_HALF=power_of_2(turned // 2), BLOCK_REST=power_of_2(max(1, width - turned)),
        SIGN=sign, num_warps=4,
    )  # fmt: skip


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, cos, sin, out, 1, x.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        cos, sin = ctx.saved_tensors
        _launch(grad, cos, sin, out, -1, grad.shape[1])
        return out, None, None


class _QKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, padded: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        tokens, _, heads, width = qkv.shape
        ctx.width = width
        make = torch.empty if padded == width else torch.zeros
        out = make(3, tokens, heads, padded, dtype=qkv.dtype, device=qkv.device)
        for part in range(3):
            _launch(qkv[:, part], cos, sin, out[part], 1, heads if part < 2 else 0)
        return out[0], out[1], out[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, heads, _ = grads[0].shape
        cos, sin = ctx.saved_tensors
        out = torch.empty(tokens, 3, heads, ctx.width, dtype=grads[0].dtype, device=grads[0].device)
        for part, grad in enumerate(grads):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            _launch(grad[..., : ctx.width], cos, sin, out[:, part], -1, heads if part < 2 else 0)
        return out, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first R channels of x (T, H, D) turned by angles given as cos and sin (T, R), fp32 and the same in both halves."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out: Tensor = _Rotary.apply(x, cos.contiguous(), sin.contiguous())
    return out


def rotate_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, padded: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, 3, H, D) -> queries and keys turned, and values, each (T, H, D) dense; cos and sin (T, R) as in `rotate`.

    `padded`: width of the heads that are returned, at least D; zeros fill it.
    """
    wide = padded or qkv.shape[-1]
    out: tuple[Tensor, Tensor, Tensor] = _QKV.apply(qkv, cos.contiguous(), sin.contiguous(), wide)
    return out
