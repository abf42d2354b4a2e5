"""The Triton kernels, run by Triton's interpreter on the CPU in fp32, against plain PyTorch: prints the largest error of each.

    TRITON_INTERPRET=1 python tests/support/interpret_kernels.py

A process of its own, as Triton decides when it is imported. Errors are relative to the largest value.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.kernels.conv import causal_conv_silu
from zoo.nn.kernels.layer_norm import layer_norm
from zoo.nn.kernels.loss import cross_entropy
from zoo.nn.kernels.norm import gated_rms_norm, rms_norm
from zoo.nn.kernels.rotary import rotate, rotate_qkv
from zoo.nn.kernels.swiglu import swiglu
from zoo.nn.rotary import apply_rotary

LENGTHS = (1, 2, 70, 40, 3)  # of segments: one token, fewer than the convolution sees, more than a tile


def error(kernel: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> float:
    """Largest relative error of results and gradients."""
    torch.manual_seed(1)
    pairs = []
    grads: list[list[Tensor]] = []
    for function in (kernel, plain):
        given = [x.clone().requires_grad_() for x in inputs]
        out = function(*given)
        out = out if isinstance(out, tuple) else (out,)
        if not pairs:
            slopes = [torch.randn_like(x) for x in out]
        torch.autograd.backward(out, slopes)
        pairs.append([x.detach() for x in out])
        grads.append([x.grad for x in given if x.grad is not None])
    found = zip(pairs[0] + grads[0], pairs[1] + grads[1], strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in found)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """`rotate` in plain PyTorch."""
    return apply_rotary(x[:, None], angles.cos()[:, None, None], angles.sin()[:, None, None])[:, 0]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """`causal_conv_silu` of a slice of columns, a segment at a time."""
    width, taps = weight.shape
    parts = [
        F.silu(F.conv1d(F.pad(part.t()[None], (taps - 1, 0)), weight[:, None], groups=width)[0].t())
        for part in x[:, 3 : 3 + width].split(list(LENGTHS))
    ]
    return torch.cat(parts)


def swiglu_plain(x: Tensor, probs: Tensor | None = None) -> Tensor:
    """SwiGLU in plain PyTorch."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up * (1.0 if probs is None else probs[:, None])


def main() -> None:
    """Every kernel, of odd sizes and strides."""
    torch.manual_seed(0)
    half = torch.randn(9, 8)
    angles = torch.cat((half, half), -1)
    cos, sin = angles.cos(), angles.sin()
    places = torch.cat([torch.arange(n) for n in LENGTHS])
    targets = torch.randint(0, 20001, (6,))
    rows, weight = torch.randn(70, 3, 40), torch.randn(40)
    tokens = sum(LENGTHS)
    errors = {
        "rms_norm": error(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (40,), w, 1e-6), rows, weight),
        "rms_norm centred, of a slice": error(
            lambda x, w: rms_norm(x[:, :, 2:5, :40], w, 1e-6, True),
            lambda x, w: F.rms_norm(x[:, :, 2:5, :40], (40,), 1 + w, 1e-6),
            torch.randn(7, 1, 6, 80), weight,
        ),
        "rms_norm, wide": error(
            lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (5000,), w, 1e-6),
            torch.randn(3, 5000), torch.randn(5000),
        ),
        "gated_rms_norm": error(
            lambda x, g, w: gated_rms_norm(x, g, w, 1e-6),
            lambda x, g, w: F.rms_norm(x, (40,), w, 1e-6) * F.silu(g),
            rows, torch.randn(70, 3, 40), weight,
        ),
        "layer_norm": error(
            lambda x, w, b: layer_norm(x, w, b, 1e-6), lambda x, w, b: F.layer_norm(x, (72,), w, b, 1e-6),
            torch.randn(300, 72), torch.randn(72), torch.randn(72),
        ),
        "swiglu": error(swiglu, swiglu_plain, torch.randn(5, 2, 2 * 2100)),
        "swiglu with weights": error(swiglu, swiglu_plain, torch.randn(5, 2 * 300), torch.rand(5)),
        "rotate": error(lambda x: rotate(x, cos, sin), lambda x: turned(x, angles), torch.randn(9, 3, 40)),
        "rotate, of a slice": error(
            lambda x: rotate(x[:, 1:4, :40], cos, sin), lambda x: turned(x[:, 1:4, :40], angles), torch.randn(9, 5, 80)
        ),
        "rotate_qkv": error(
            lambda x: rotate_qkv(x, cos, sin),
            lambda x: (turned(x[:, 0], angles), turned(x[:, 1], angles), x[:, 2] * 1.0),
            torch.randn(9, 3, 5, 16),
        ),
        "cross_entropy": error(
            lambda x: cross_entropy(x * 1.0, targets),
            lambda x: F.cross_entropy(x, targets, reduction="none"),
            torch.randn(6, 20001) * 3,
        ),
        "causal_conv_silu": error(
            lambda x, w: causal_conv_silu(x[:, 3:80], w, places), convolved, torch.randn(tokens, 90), torch.randn(77, 4)
        ),
    }  # fmt: skip
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
