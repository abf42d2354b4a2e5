"""Fused Triton kernels for the operations between matrix products: norms and sums, GELU, rotary, SwiGLU, cross entropy.

Plain PyTorch makes five to ten passes over memory for each of these and keeps fp32 copies for the backward pass. Every
kernel here makes one pass each way, computes in fp32 and rounds once. They serve half precision on a GPU; everything
else (CPU, fp32) takes the plain operations that stand beside each call, and which the kernels are tested against.

Triton comes with PyTorch where there are GPUs; nothing is compiled at install.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor


def fused(x: Tensor) -> bool:
    """Whether the kernels take this tensor: half precision on a GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total (O, I) += grad (T, O)^T x (T, I), in the precision of `total`, which may be fp32 where they are not."""
    if x.dtype == total.dtype:
        total.addmm_(grad.t(), x)
    else:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)


def bias_gradient(grad: Tensor) -> Tensor:
    """Gradient (O,) of a linear's bias, of grad (T, O)."""
    if not fused(grad):
        return grad.sum(0)
    from zoo.nn.kernels.launch import column_sums

    return column_sums(grad).to(grad.dtype)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Gradient (O, I) of a linear's weight, of grad (T, O) and x (T, I), behind whose I values columns of zeros may follow.

    Where the weight is marked (`adds_products`, see `zoo.nn.weight_gradients`), it is added to DDP's buffer, and what is returned
    says no more than that there is one.
    """
    width = weight.shape[1]
    if not getattr(weight, "adds_products", False):
        return (grad.t() @ x)[:, :width].to(weight.dtype)
    total: Tensor = weight.main_grad  # type: ignore[attr-defined]
    if x.shape[1] == width:
        add_product(total, grad, x)
    else:  # a product of all columns, as one of a width that is no multiple of 16 bytes takes twice as long
        product = grad.t() @ x if x.dtype == total.dtype else torch.mm(grad.t(), x, out_dtype=total.dtype)
        total.add_(product[:, :width])
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)
