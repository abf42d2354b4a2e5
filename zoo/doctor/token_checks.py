"""Checks of kernels that take each token by itself: norms, rotary, SwiGLU, the output gate, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import fused_name, make_check, randn, row_layout, rows_of
from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check, Trial
from zoo.nn.decoder.attention.rotary import apply_rotary, axis_of_frequency
from zoo.nn.decoder.attention.self_attention import output_gate
from zoo.nn.decoder.mlp import glu
from zoo.nn.fp8.linear import fp8_linear

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

ROTARY_BOUNDS = {"bf16": 1e-2, "fp32": 1e-3}  # angles are fp32: 1e-7 of a position in the thousands
FP8_BOUNDS = {"bf16": 0.06, "fp32": 0.06}  # 3 bits of mantissa on either side of a product
LOSS_BOUNDS = {"bf16": 2e-2, "fp32": 1e-3}  # its gradient is a difference of probabilities


def token_checks(subject: Subject) -> Iterator[Check]:
    """Checks of the parts of a subject's layers, and of its head, that take each token by itself."""
    yield from _norms(subject)
    yield from _rotary(subject)
    yield _swiglu(subject)
    if subject.config.fp8_blocks:
        yield _fp8_product(subject)
    if subject.config.attention_output_gate:
        yield _output_gate(subject)
    yield _loss(subject)


def _fp8_product(subject: Subject) -> Check:
    """The widest linear of a layer: its rounding alone is a few percent off, a wrong layout of scales a hundred."""
    rows, width, out = rows_of(subject) - 1, subject.config.hidden_size, subject.config.ffn_hidden_size
    assert out is not None

    def prepare() -> Trial:
        inputs = {"x": randn(subject, rows, width), "weight": randn(subject, out, width)}
        return Trial(lambda x, weight: fp8_linear(x, weight), torch.nn.functional.linear, inputs)

    kernel = "zoo's Triton, cuBLAS" if subject.device.type == "cuda" else "torch"
    shape = f"{width} to {out}, {rows} tokens"
    return make_check(subject, "fp8_linear", kernel, shape, prepare, FP8_BOUNDS, "engine.fp8=false")


def _norms(subject: Subject) -> Iterator[Check]:
    config, layer = subject.config, subject.layer()
    attention = layer.self_attention if layer is not None else None
    heads = config.num_attention_heads
    first = subject.model.decoder.layers[0].input_layernorm
    yield _norm(subject, "norm", first, (config.hidden_size,))
    if attention is not None and getattr(attention, "q_layernorm", None) is not None:
        yield _norm(subject, "qk_norm", attention.q_layernorm, (heads, attention.config.kv_channels))
    linear = subject.layer(linear=True)
    if linear is not None:
        yield _gated_norm(subject, linear.self_attention.out_norm)


def _gated_norm(subject: Subject, module: MegatronModule) -> Check:
    heads, width = subject.config.linear_num_value_heads, subject.config.linear_value_head_dim
    rows = rows_of(subject)
    assert heads and width

    def prepare() -> Trial:
        with torch.no_grad():
            module.weight.normal_(1.0, 0.25)

        def exact(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            return references.rms_norm(x, weight, module.eps) * torch.nn.functional.silu(gate)

        inputs = {"x": randn(subject, rows, heads, width), "gate": randn(subject, rows, heads, width)}
        return Trial(lambda x, gate: module(x, gate), exact, inputs, {"weight": module.weight})

    return make_check(subject, "gated_norm", fused_name(subject), f"{rows} x {heads} x {width}", prepare)


def _norm(subject: Subject, name: str, module: MegatronModule, shape: tuple[int, ...]) -> Check:
    config, rows = subject.config, rows_of(subject)
    zero_centred = config.layernorm_zero_centered_gamma
    before = name == "norm"  # in front of a branch: it also returns the residual, whose gradient it may add

    def prepare() -> Trial:
        with torch.no_grad():
            module.weight.normal_(0.0 if zero_centred else 1.0, 0.25)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            weight = weight + 1.0 if zero_centred else weight
            normed = references.rms_norm(x, weight, config.layernorm_epsilon)
            return torch.stack((normed, x)) if before else normed

        def run(x: Tensor) -> Tensor:
            out = module(x)
            if not before:
                return out
            return torch.stack(out if isinstance(out, tuple) else (out, x))

        x = randn(subject, rows, 1, *shape)
        return Trial(run, exact, {"x": x}, {"weight": module.weight})

    kind = ", zero-centred" if zero_centred else ""
    sizes = " x ".join(map(str, (rows, *shape)))
    return make_check(subject, name, type(module).__name__, sizes + kind, prepare)


def _rotary(subject: Subject) -> Iterator[Check]:
    """Heads split, normed and rotated as attention gets them; only the rotary embedding in a family that does more to its heads."""
    config, shape = subject.config, subject.rotary
    layer = subject.layer()
    if layer is None:
        return
    attention = layer.self_attention
    layout = row_layout(subject).to(subject.device)
    heads, width = config.num_attention_heads, attention.config.kv_channels
    half = len(shape.frequencies)
    axes = axis_of_frequency(shape.sections, shape.interleaved) if shape.sections else [0] * half
    positions = layout.positions.expand(max(axes) + 1, 1, -1).clone()
    positions[1:] = positions[1:] // 3 + 5  # axes that differ, as of an image

    def exact(x: Tensor) -> Tensor:
        return references.rotary(x, positions[:, 0].double(), axes, shape.frequencies, shape.amplitude)

    def prepare() -> Trial:
        turn = subject.model.rotary(positions)
        if attention.is_plain:
            return _heads(subject, attention, turn, exact)

        inputs = {"x": randn(subject, layout.total, heads, width)}
        return Trial(lambda x: apply_rotary(x[:, None], *turn)[:, 0], exact, inputs)

    sizes = f"{heads} heads, {2 * half} of {width}, {max(axes) + 1} axes"
    if attention.is_plain:
        sizes += f", {attention.num_query_groups_per_partition} groups" + ", normed" * bool(attention.q_layernorm)
    yield make_check(subject, "rotary", fused_name(subject), sizes, prepare, ROTARY_BOUNDS)


def _heads(
    subject: Subject, attention: MegatronModule, turn: tuple[Tensor, Tensor], turned: Callable[[Tensor], Tensor]
) -> Trial:
    """Queries, keys, values and gates side by side; `turned`: what the reference makes of heads (T, H, D), their angles being `turn`."""
    config, width = subject.config, attention.config.kv_channels
    groups, gated = attention.num_query_groups_per_partition, bool(config.attention_output_gate)
    repeats, centered = attention.num_attention_heads_per_partition // groups, config.layernorm_zero_centered_gamma
    parts = [repeats] * (2 if gated else 1) + [1, 1]
    norms = {"queries": attention.q_layernorm, "keys": attention.k_layernorm}
    weights = {name: norm.weight for name, norm in norms.items() if norm is not None}
    with torch.no_grad():
        for weight in weights.values():
            weight.normal_(0.0 if centered else 1.0, 0.25)

    def run(mixed: Tensor) -> Tensor:
        heads = attention.turned_heads(mixed.flatten(1)[:, None], *turn)
        return torch.cat([x.reshape(len(mixed), -1, width) for x in heads], dim=1)

    def exact(mixed: Tensor, **weights: Tensor) -> Tensor:
        query, *gate, key, value = (x.flatten(1, 2) for x in mixed.split(parts, dim=2))
        both = {"queries": query, "keys": key}
        for name, weight in weights.items():
            both[name] = references.rms_norm(both[name], weight + centered, config.layernorm_epsilon)
        return torch.cat([*map(turned, both.values()), value, *gate], dim=1)

    mixed = randn(subject, turn[0].shape[0], groups, sum(parts), width)
    return Trial(run, exact, {"mixed": mixed}, weights)


def _swiglu(subject: Subject) -> Check:
    """The dense MLP's gated unit, each row times a probability as in an expert."""
    rows, width, activation = rows_of(subject), subject.config.ffn_hidden_size, subject.config.activation_func
    assert width is not None

    def prepare() -> Trial:
        def exact(x: Tensor, probs: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return activation(gate) * up * probs[:, None]

        inputs = {"x": randn(subject, rows, 2 * width), "probs": torch.rand(rows, device=subject.device)}
        return Trial(lambda x, probs: glu(x, activation, probs), exact, inputs)

    return make_check(subject, "swiglu", fused_name(subject), f"{rows} x {width}", prepare)


def _output_gate(subject: Subject) -> Check:
    heads, width = subject.config.num_attention_heads, subject.config.kv_channels
    rows, channels = rows_of(subject), heads * (width or 0)

    def prepare() -> Trial:
        inputs = {name: randn(subject, rows, channels) for name in ("x", "gate")}
        return Trial(output_gate, lambda x, gate: x * gate.sigmoid(), inputs)

    return make_check(subject, "output_gate", fused_name(subject), f"{rows} x {channels}", prepare)


def _loss(subject: Subject) -> Check:
    layout = row_layout(subject)
    hidden, vocab = subject.config.hidden_size, subject.model.vocabulary.size
    rows = torch.arange(0, layout.total, 4, device=subject.device)  # a quarter has labels

    def prepare() -> Trial:
        weight = subject.model.output_layer.weight
        with torch.no_grad():
            weight.normal_(0, 2 * hidden**-0.5)  # a head that has learned something
        targets = torch.randint(vocab, (len(rows),), device=subject.device)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return references.cross_entropy(x[:, 0], weight, rows, targets)

        inputs, weights = {"x": randn(subject, layout.total, 1, hidden)}, {"weight": weight}
        return Trial(lambda x: subject.model._head(x, rows, targets), exact, inputs, weights, exact=torch.float32)

    shape = f"vocabulary {vocab}, hidden {hidden}, {len(rows)} labels"
    return make_check(subject, "loss", fused_name(subject), shape, prepare, LOSS_BOUNDS)
