"""The Triton kernels, run by Triton's interpreter on the CPU in fp32, against plain PyTorch: prints the largest error of each.

    TRITON_INTERPRET=1 python tests/support/interpret_kernels.py

A process of its own, as Triton decides when it is imported. Errors are relative to the largest value.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zoo.nn.kernels.gelu
import zoo.nn.kernels.layer_norm
import zoo.nn.kernels.norm
import zoo.nn.kernels.rotary
from zoo.nn.decoder.attention.rotary import apply_rotary
from zoo.nn.decoder.experts import exchange, router
from zoo.nn.decoder.experts.exchange import Permutation
from zoo.nn.decoder.frozen import nf4
from zoo.nn.decoder.frozen.modules import hold
from zoo.nn.kernels import experts as kernels
from zoo.nn.kernels.conv import causal_conv_silu, delta_inputs
from zoo.nn.kernels.experts import add_lowrank
from zoo.nn.kernels.gate import gated
from zoo.nn.kernels.gelu import linear_gelu
from zoo.nn.kernels.launch import column_sums
from zoo.nn.kernels.layer_norm import add_layer_norm, layer_norm
from zoo.nn.kernels.loss import cross_entropy
from zoo.nn.kernels.nf4 import dequantise
from zoo.nn.kernels.norm import gated_rms_norm, rms_norm, rms_norm_residual
from zoo.nn.kernels.rotary import Norms, cut_heads, rotate, rotate_qkv, split_heads
from zoo.nn.kernels.swiglu import swiglu

LENGTHS = (1, 2, 70, 40, 3)  # of segments: one token, fewer than the convolution sees, more than a tile


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest error of a tensor over its largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


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
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in found]).max())  # NaN if one is


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """`rotate` in plain PyTorch."""
    return apply_rotary(x[:, None], angles.cos()[:, None, None], angles.sin()[:, None, None])[:, 0]


def heads(
    groups: int, repeats: int, width: int, turning: int, *, gated: bool, normed: bool = True, frozen: bool = False
) -> float:
    """Error of `split_heads` of 70 tokens, whose first `turning` channels turn; centred norms where `gated`."""
    angles = torch.randn(70, turning // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    parts = [repeats] * (2 if gated else 1) + [1, 1]

    def kernel(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        norms = Norms(*weights, 1e-6, gated) if weights else None
        return split_heads(mixed, cos, sin, repeats, gated, norms)

    def plain(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        q, *gate, k, v = mixed.split(parts, dim=2)
        both = [q.flatten(1, 2), k.flatten(1, 2)]
        if weights:
            both = [F.rms_norm(x, (width,), w + gated, 1e-6) for x, w in zip(both, weights, strict=True)]
        return *(turned(x, angles) for x in both), v.flatten(1, 2) * 1.0, *(x * 1.0 for x in gate)

    weights = (torch.randn(width), torch.randn(width)) if normed else ()
    mixed = torch.randn(70, groups, sum(parts), width)
    if frozen:
        return error(lambda x: kernel(x, *weights), lambda x: plain(x, *weights), mixed)
    return error(kernel, plain, mixed, *weights)


def convolution(lengths: tuple[int, ...], width: int, taps: int) -> float:
    """Error of `causal_conv_silu` of a slice of columns, against a segment at a time."""
    places = torch.cat([torch.arange(n) for n in lengths])

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        padded = (F.pad(part.t()[None], (taps - 1, 0)) for part in x[:, 3 : 3 + width].split(list(lengths)))
        return torch.cat([F.silu(F.conv1d(x, weight[:, None], groups=width)[0].t()) for x in padded])

    x, weight = torch.randn(sum(lengths), width + 13), torch.randn(width, taps)
    return error(lambda x, w: causal_conv_silu(x[:, 3 : 3 + width], w, places), plain, x, weight)


def delta(lengths: tuple[int, ...], widths: tuple[int, int, int, int], heads: int, taps: int) -> float:
    """Error of `delta_inputs`, against a segment at a time and plain gates."""
    places = torch.cat([torch.arange(n) for n in lengths])

    def plain(mixed: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
        qkv, gate, beta, alpha = mixed.split([sum(widths[:3]), widths[3], heads, heads], dim=1)
        padded = (F.pad(part.t()[None], (taps - 1, 0)) for part in qkv.split(list(lengths)))
        groups = len(weight)
        out = torch.cat([F.silu(F.conv1d(x, weight[:, None], groups=groups)[0].t()) for x in padded])
        return (*out.split(widths[:3], dim=1), gate, -a_log.exp() * F.softplus(alpha + dt_bias), beta.sigmoid())

    mixed = torch.randn(sum(lengths), sum(widths) + 2 * heads) * 3
    mixed[:5, -heads:] = torch.tensor([-30.0, -9.0, 0.0, 9.0, 30.0])[: len(mixed), None]
    inputs = mixed, torch.randn(sum(widths[:3]), taps), torch.randn(heads), torch.randn(heads)
    return error(lambda x, w, a, b: delta_inputs(x, w, a, b, places, widths), plain, *inputs)


def outputs(function: Callable[..., tuple[Tensor, ...]], which: int | None) -> Callable[..., Any]:
    """One of the function's two results, so that the other has no gradient; or both."""
    return lambda *inputs: function(*inputs) if which is None else function(*inputs)[which]


def residual_norms(which: int | None) -> dict[str, float]:
    """Errors of the norms with a residual path, where the gradients of `which` result are given."""

    def layer(x: Tensor, delta: Tensor | None, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 1.0 if delta is None else x + delta
        return F.layer_norm(total, w.shape, w, b, 1e-6), total

    def rms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(x, w.shape, 1 + w, 1e-6), x * 1.0

    x, delta, weight, bias = torch.randn(14, 3, 40), torch.randn(14, 3, 40), torch.randn(40), torch.randn(40)

    def compare(kernel: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> float:
        return error(outputs(kernel, which), outputs(plain, which), *inputs)

    return {
        "rms_norm_residual": compare(lambda x, w: rms_norm_residual(x, w, 1e-6, True), rms, x, weight),
        "rms_norm_residual, of a slice": compare(
            lambda x, w: rms_norm_residual(x[..., :40], w, 1e-6, True), lambda x, w: rms(x[..., :40], w),
            torch.randn(7, 3, 80), weight,
        ),
        "rms_norm_residual, one row": compare(
            lambda x, w: rms_norm_residual(x, w, 1e-6, True), rms, torch.randn(1, 2500), torch.randn(2500)
        ),
        "add_layer_norm": compare(
            lambda x, d, w, b: add_layer_norm(x, d, w, b, 1e-6), layer, x, delta, weight, bias
        ),
        "add_layer_norm of one twice": compare(
            lambda x, w, b: add_layer_norm(x, x, w, b, 1e-6), lambda x, w, b: layer(x, x, w, b), x, weight, bias
        ),
        "add_layer_norm, no delta": compare(
            lambda x, w, b: add_layer_norm(x, None, w, b, 1e-6), lambda x, w, b: layer(x, None, w, b), x, weight, bias
        ),
    }  # fmt: skip


def block(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, norm: Callable[..., Any]) -> Tensor:
    """Two pre-norm steps on one residual path, all of whose tensors have several gradients."""
    normed, x = norm(x, delta, weight, bias, 1e-6)
    normed, x = norm(x, normed.tanh(), weight, bias, 1e-6)
    return normed + x * delta


def block_plain(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`block` in plain PyTorch."""
    return block(x, delta, weight, bias, lambda x, d, w, b, e: (F.layer_norm(x + d, w.shape, w, b, e), x + d))


def gelu_of_linear(tanh: bool, rows: tuple[int, ...], frozen: tuple[str, ...] = ()) -> float:
    """Error of `linear_gelu` (..., 40) -> (..., 600) with strided gradients, without those of what is frozen."""
    made = {"x": torch.randn(*rows, 40), "weight": torch.randn(600, 40) / 6, "bias": torch.randn(600)}
    learned = [name for name in made if name not in frozen]

    def run(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: function(**{**made, **dict(zip(learned, given, strict=True))}).transpose(0, -1)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh" if tanh else "none")

    return error(run(lambda **x: linear_gelu(**x, tanh=tanh)), run(plain), *(made[name] for name in learned))


def permutation_of(experts: int, here: int, tokens: int, topk: int) -> tuple[Permutation, int]:
    """Permutation of tokens for the first `here` experts, and how many these are."""
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices.clamp(max=here)
    count = int((chosen < here).sum())
    return Permutation.from_choices(chosen, here, count), count


def sorted_choices(experts: int, here: int, first: int, tokens: int, topk: int, share: float | None) -> float:
    """0 if choices are sorted as plain PyTorch sorts them, a `share` of the rows having none; they lie beside something else."""
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices.to(torch.int32)
    chosen = torch.cat([chosen, chosen], dim=1)[:, topk:]
    if share is not None:
        chosen[torch.rand(tokens) < share] = -1
    counts, upto = kernels.count_choices(chosen, here, first)
    marked = tokens % 2 == 0
    found = kernels.place_choices(chosen, here, first, counts, upto, marked)
    wanted = exchange._sorted(chosen, here, first)
    assert not marked or torch.equal(found[1], wanted[1])
    count = int(upto[-1])
    assert count == int(wanted[3][-1])
    behind = zip(found[:2], wanted[:2], strict=True)
    same = [torch.equal(a[:count], b[:count]) for a, b in behind]
    same += [torch.equal(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)]
    values = torch.randn(tokens, 2 * topk)[:, topk:]
    for table, index in ((values, found[1][:count]), (torch.randn(count, 1), found[2])):
        same.append(torch.equal(kernels.take(table, index), exchange.take(table, index)))
    return float(not all(same))


def router_top(experts: int, tokens: int, topk: int) -> float:
    """0 if the kernel finds the experts that a stable sort puts first."""
    scores = torch.randn(tokens, experts)
    scores[::2] = scores[::2].round()
    scores[0, :3] = torch.tensor([float("inf"), -float("inf"), -0.5])
    wanted = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    # The kernel takes -0 for less than 0; adding 0 turns it into 0.
    return float(not torch.equal(kernels.top(scores + 0.0, topk), wanted))


def router_loads(experts: int, tokens: int, topk: int, *, masked: bool) -> float:
    """Error of a router's sums and of their gradient; 1 where counts are wrong."""
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices
    mask = torch.rand(tokens) < 0.4 if masked else None
    logits = 3 * torch.randn(tokens, experts)
    if not torch.equal(kernels.loads(logits, chosen, mask)[1], router.loads(logits, chosen, mask)[1].float()):
        return 1.0
    return error(lambda x: kernels.loads(x, chosen, mask)[0], lambda x: router.loads(x, chosen, mask)[0], logits)


def experts_ways(experts: int, here: int, tokens: int, topk: int, width: int) -> float:
    """Error of the way to experts and back."""
    permutation, count = permutation_of(experts, here, tokens, topk)
    rows, factors = torch.randn(tokens, width), torch.rand(count, 1)
    there = kernels.gather_rows(rows, permutation.tokens)
    torch.testing.assert_close(there, exchange.gather_rows(rows, permutation.tokens), rtol=0, atol=0)
    found, wanted = (module.sum_rows(there * factors, permutation.places) for module in (kernels, exchange))
    return float((found - wanted).abs().max() / wanted.abs().max())


def lowrank_products(width: int, rank: int, ends: list[int]) -> float:
    """Error of what `add_lowrank` adds."""
    counts = [b - a for a, b in pairwise([0, *ends])]
    out, x, weight = (torch.randn(ends[-1], width), torch.randn(ends[-1], rank), torch.randn(len(ends), width, rank))
    parts = zip(x.split(counts), weight, strict=True)
    wanted = out + torch.cat([rows @ matrix.t() for rows, matrix in parts])
    found = add_lowrank(out, x, weight, torch.tensor(ends, dtype=torch.int32))
    return float((found - wanted).abs().max() / wanted.abs().max())


def dequantised(*shape: int) -> float:
    held = hold(torch.randn(shape), "nf4")
    assert isinstance(held, nf4.Nf4)
    found = torch.full(shape, torch.nan)
    dequantise(held.codes, held.factors(), nf4.levels(found.device), found)
    return relative(found, held.dense())


def added_gradients(count: int) -> float:
    """Error of a sum of fp32 and half precision."""
    total, grad = torch.randn(count), torch.randn(count).bfloat16()
    wanted = total + grad
    kernels.accumulate(total, grad)
    return float((total - wanted).abs().max())


def bounded_swiglu(rows: int, width: int, end: int) -> float:
    """Error of rows up to an end, as far as it goes; 1 where a value behind it was read, or one was written."""
    x, probs, slope = torch.randn(rows, 2 * width), torch.rand(rows), torch.randn(rows, width)
    for values in (x, probs, slope):
        values[end:] = float("nan")
    given = x.requires_grad_(), probs.requires_grad_()
    written: list[torch.Tensor] = []
    make = torch.empty

    def noted(*shape: Any, **kwargs: Any) -> torch.Tensor:
        written.append(make(*shape, **kwargs).fill_(7.0))
        return written[-1]

    torch.empty = noted  # type: ignore[assignment]
    try:
        out = swiglu(*given, end=torch.tensor([end], dtype=torch.int32))
    finally:
        torch.empty = make
    found = out[:end], *(one[:end] for one in torch.autograd.grad(out, given, slope))
    if not (out[end:] == 7.0).all():
        return 1.0
    kept = [one.detach()[:end].requires_grad_() for one in given]
    plain = swiglu_plain(*kept)
    wanted = plain, *torch.autograd.grad(plain, kept, slope[:end])
    return max(relative(a, b) for a, b in zip(found, wanted, strict=True)) if end else 0.0


def swiglu_plain(x: Tensor, probs: Tensor | None = None) -> Tensor:
    """SwiGLU in plain PyTorch."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up * (1.0 if probs is None else probs[:, None])


def few_programs() -> None:
    """Make the kernels that sum over rows take several tiles to a program, as they do for thousands of rows."""
    for module in (zoo.nn.kernels.gelu, zoo.nn.kernels.layer_norm, zoo.nn.kernels.norm):
        launch = replace(module.backward_launch(40), programs=3, rows=4)
        module.backward_launch = lambda width, launch=launch: launch  # type: ignore[attr-defined]
    zoo.nn.kernels.rotary.backward_launch = zoo.nn.kernels.norm.backward_launch


def main() -> None:
    """Every kernel, of odd sizes and strides."""
    torch.use_deterministic_algorithms(True)  # what nothing is written to is NaN
    torch.manual_seed(0)
    half = torch.randn(9, 8)
    angles = torch.cat((half, half), -1)
    cos, sin = angles.cos(), angles.sin()
    targets = torch.randint(0, 20001, (6,))
    rows, weight = torch.randn(70, 3, 40), torch.randn(40)
    tall = torch.randn(2500, 70)
    errors = {
        "column_sums, in two steps": relative(column_sums(tall), tall.sum(0)),
        "column_sums, bf16": relative(column_sums(tall[:300].bfloat16()), tall[:300].bfloat16().float().sum(0)),
        "column_sums, one row": relative(column_sums(tall[:1, :5]), tall[0, :5]),
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
        "tokens to experts": experts_ways(8, 8, 12, 2, 40),
        "tokens to some of the experts": experts_ways(300, 260, 12, 4, 2100),
        "gradients of two micro-batches": added_gradients(5000),
        "router's choice": router_top(128, 70, 8),
        "router's choice, uneven": router_top(20, 7, 4),
        "router's choice, many experts": router_top(300, 3, 10),
        "router's loads": router_loads(20, 700, 4, masked=False),
        "router's loads, padding": router_loads(16, 70, 2, masked=True),
        "router's loads, one token": router_loads(300, 1, 8, masked=False),
        "sorted choices": sorted_choices(20, 5, 10, 700, 4, None),
        "sorted choices, rows without any": sorted_choices(7, 3, 0, 130, 3, 0.3),
        "sorted choices, many experts": sorted_choices(300, 300, 0, 9, 8, None),
        "sorted choices, none here": sorted_choices(6, 2, 6, 40, 2, None),
        "sorted choices, no tokens": sorted_choices(6, 2, 0, 0, 2, None),
        "low-rank products": lowrank_products(300, 8, [0, 70, 70, 200, 201]),
        "wide ones": lowrank_products(40, 40, [3, 5, 5]),
        "swiglu": error(swiglu, swiglu_plain, torch.randn(5, 2, 2 * 2100)),
        "swiglu of the first rows": bounded_swiglu(19, 300, 11),
        "swiglu of no rows": bounded_swiglu(9, 40, 0),
        "swiglu with weights": error(swiglu, swiglu_plain, torch.randn(5, 2 * 300), torch.rand(5)),
        "geglu": error(
            lambda x: swiglu(x, gelu=True), lambda x: F.gelu(x[..., :300], approximate="tanh") * x[..., 300:],
            3 * torch.randn(5, 2 * 300),
        ),
        "gated, strided": error(
            lambda x, g: gated(x, g[:, :40]), lambda x, g: x * g[:, :40].sigmoid(), torch.randn(211, 40), torch.randn(211, 60)
        ),
        "rotate": error(lambda x: rotate(x, cos, sin), lambda x: turned(x, angles), torch.randn(9, 3, 40)),
        "rotate, of a slice": error(
            lambda x: rotate(x[:, 1:4, :40], cos, sin), lambda x: turned(x[:, 1:4, :40], angles), torch.randn(9, 5, 80)
        ),
        "rotate_qkv": error(
            lambda x: rotate_qkv(x, cos, sin),
            lambda x: (turned(x[:, 0], angles), turned(x[:, 1], angles), x[:, 2] * 1.0),
            torch.randn(9, 3, 5, 16),
        ),
        "rotate_qkv, padded": error(
            lambda x: rotate_qkv(x, cos, sin, 24),
            lambda x: tuple(F.pad(one, (0, 8)) for one in (turned(x[:, 0], angles), turned(x[:, 1], angles), x[:, 2])),
            torch.randn(9, 3, 5, 16),
        ),
        "cut_heads": error(lambda x: cut_heads(x, 16), lambda x: x[..., :16], torch.randn(9, 5, 24)),
        "split_heads": heads(2, 4, 40, 40, gated=False),
        "split_heads, turned in part": heads(2, 3, 40, 16, gated=True),
        "split_heads, frozen norms": heads(2, 3, 40, 40, gated=False, frozen=True),
        "split_heads, without norms": heads(3, 1, 40, 40, gated=False, normed=False),
        "split_heads, gates without norms": heads(1, 2, 40, 16, gated=True, normed=False),
        "cross_entropy": error(
            lambda x: cross_entropy(x * 1.0, targets),
            lambda x: F.cross_entropy(x, targets, reduction="none"),
            torch.randn(6, 20001) * 3,
        ),
        "causal_conv_silu": convolution(LENGTHS, 300, 4),
        "causal_conv_silu, two taps": convolution(LENGTHS, 77, 2),
        "causal_conv_silu, one token": convolution((1,), 77, 4),
        "causal_conv_silu, ends at tiles": convolution((61, 1, 2, 64, 62, 66), 77, 4),
        "causal_conv_silu, short segments": convolution((2, 1, 3) * 12, 77, 4),
        "delta_inputs": delta(LENGTHS, (300, 300, 77, 52), 5, 4),
        "delta_inputs, one token": delta((1,), (16, 16, 32, 32), 16, 4),
        "delta_inputs, two taps": delta((61, 1, 2, 64), (20, 20, 520, 40), 3, 2),
        "linear_gelu, tanh": gelu_of_linear(True, (5, 31)),
        "linear_gelu, exact": gelu_of_linear(False, (5, 31)),
        "linear_gelu, one row": gelu_of_linear(True, (1,)),
        "linear_gelu, frozen weight": gelu_of_linear(True, (31,), ("weight",)),
        "linear_gelu, frozen but for the bias": gelu_of_linear(True, (31,), ("x", "weight")),
        "linear_gelu, frozen but for the weight": gelu_of_linear(False, (31,), ("x", "bias")),
        "layer_norm, one row": error(
            lambda x, w, b: layer_norm(x, w, b, 1e-6), lambda x, w, b: F.layer_norm(x, (1100,), w, b, 1e-6),
            torch.randn(1, 1100), torch.randn(1100), torch.randn(1100),
        ),
        "add_layer_norm, on one path": error(
            lambda x, d, w, b: block(x, d, w, b, add_layer_norm), block_plain,
            torch.randn(70, 40), torch.randn(70, 40), torch.randn(40), torch.randn(40),
        ),
    }  # fmt: skip
    for which in (None, 0, 1):
        errors |= {f"{name}, results {which}": value for name, value in residual_norms(which).items()}
    few_programs()
    errors |= {f"{name}, few programs": value for name, value in residual_norms(None).items()}
    errors |= {f"nf4 {shape}": dequantised(*shape) for shape in ((3, 5, 130), (130, 1100))}
    errors["split_heads, few programs"] = heads(2, 3, 40, 16, gated=True)
    errors["linear_gelu, few programs"] = gelu_of_linear(True, (5, 31))
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
