"""The checks of a recipe: each kernel where the model has it, at the recipe's shapes, and its reference.

Bounds are relative errors, |a - b| / |b|, of a whole tensor against fp64 on the same inputs. Rounding the inputs of
bf16 products alone makes 2e-3 to 4e-3; a kernel that is wrong makes 0.1 and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import (
    BOUNDS,
    KEEP,
    MOST_TOKENS,
    fused_name,
    randn,
    real_tokens,
    row_layout,
    row_shape,
    spans,
    varlen_name,
)
from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check, Trial
from zoo.doctor.towers import tower_checks
from zoo.nn.decoder import gated_delta_net
from zoo.nn.decoder.attention import SeqParams, output_gate
from zoo.nn.decoder.mlp import swiglu
from zoo.nn.decoder.rotary import apply_rotary, axis_of_frequency
from zoo.nn.kernels.widths import fla_takes, grouped_takes
from zoo.packing import PackedLayout

DELTA_RULE_BOUNDS = {"bf16": 2e-2, "fp32": 1e-3}  # a chain of products, each rounded
LOSS_BOUNDS = {"bf16": 2e-2, "fp32": 1e-3}  # its gradient is a difference of probabilities


def checks(subject: Subject) -> Iterator[Check]:
    """Every check of a subject."""
    mode = subject.recipe.packing.mode
    yield from _attention(subject, packed_first=mode == "thd")
    yield from _linear_attention(subject)
    yield from _experts(subject)
    yield from _norms(subject)
    yield from _rotary(subject)
    yield _swiglu(subject)
    if subject.config.attention_output_gate:
        yield _output_gate(subject)
    yield _loss(subject)
    yield from tower_checks(subject)


def _attention(subject: Subject, packed_first: bool) -> Iterator[Check]:
    config, layer = subject.config, subject.layer()
    if layer is None:
        return
    core, heads, groups = (
        layer.self_attention.core_attention,
        config.num_attention_heads,
        config.num_query_groups,
    )
    width, layout = config.kv_channels, row_layout(subject).to(subject.device)
    assert width is not None and groups is not None
    scale, kernel = width**-0.5, core_name(core, subject)
    sizes = f"{heads} heads / {groups} KV x {width}"
    mend = "engine.backend=torch" if kernel.startswith("TE") else KEEP

    def packed() -> Trial:
        q, k, v = (randn(subject, layout.total, n, width) for n in (heads, groups, groups))
        params = SeqParams.of(layout)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = core(
                q, k, v, None, attn_mask_type=layer.self_attention.attn_mask_type, packed_seq_params=params
            )
            return out.reshape(layout.total, heads, width)

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return references.attention(q, k, v, spans(layout), scale, causal=True)

        return Trial(run, exact, {"q": q, "k": k, "v": v}, real=real_tokens(layout, subject.device))

    def padded() -> Trial:
        lengths = sorted((min(n, 1024) for n in layout.lengths), reverse=True)[:4]
        tokens, rows = max(lengths), len(lengths)
        q, k, v = (randn(subject, tokens, rows, n, width) for n in (heads, groups, groups))
        ends = torch.tensor(lengths, device=subject.device)
        real = torch.arange(tokens, device=subject.device)[:, None] < ends  # (T, B)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = core(
                q, k, v, None, attn_mask_type=layer.self_attention.attn_mask_type, packed_seq_params=None
            )
            return out.reshape(tokens, rows, heads, width)

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
            each = [(row * tokens, row * tokens + n) for row, n in enumerate(lengths)]
            out = references.attention(q, k, v, each, scale, causal=True)
            return out.unflatten(0, (rows, tokens)).transpose(0, 1)

        return Trial(run, exact, {"q": q, "k": k, "v": v}, real=real)

    bound = BOUNDS[subject.precision]
    both = (
        Check("attention", kernel, f"{sizes}, {row_shape(layout)}", subject.precision, bound, mend, packed),
        Check("attention_padded", kernel, f"{sizes}, 4 padded rows", subject.precision, bound, mend, padded),
    )
    yield from both if packed_first else reversed(both)


def core_name(core: Any, subject: Subject) -> str:
    """What a core attention runs as on this device."""
    name = type(core).__name__
    if name.startswith("TE"):
        return name
    assert subject.config.kv_channels is not None
    return varlen_name(subject, subject.config.kv_channels)


def _linear_attention(subject: Subject) -> Iterator[Check]:
    layer = subject.layer(linear=True)
    if layer is None:
        return
    config, layout = subject.config, row_layout(subject).to(subject.device)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    taps = config.linear_conv_kernel_dim
    assert keys and values and key_width and value_width and taps
    channels, real = 2 * keys * key_width + values * value_width, real_tokens(layout, subject.device)
    probe, wanted = (
        torch.empty(0, dtype=subject.dtype, device=subject.device),
        layer.self_attention.delta_rule,
    )
    fla = gated_delta_net.has_fla(probe) and fla_takes(key_width, value_width)
    kernel, where = "fla" if fla else "torch", row_shape(layout)

    def convolution() -> Trial:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            return gated_delta_net.causal_convolution(x, weight, layout)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return references.convolution(x, weight, spans(layout))

        given = {"x": randn(subject, layout.total, channels), "weight": randn(subject, channels, taps)}
        return Trial(run, exact, given, real=real)

    yield Check(
        "convolution",
        fused_name(subject),
        f"{channels} channels, width {taps}, {where}",
        subject.precision,
        BOUNDS[subject.precision],
        KEEP,
        convolution,
    )

    def rule() -> Trial:
        def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
            return gated_delta_net.gated_delta_rule(q, k, v, decay, beta, layout, wanted)

        return delta_rule_trial(subject, layout, keys, values, key_width, value_width, run)

    sizes = f"{keys} key heads x {key_width}, {values} value heads x {value_width}"
    rule_kernel = "torch" if wanted == "torch" else kernel
    yield Check(
        "delta_rule",
        rule_kernel,
        f"{sizes}, {where}",
        subject.precision,
        DELTA_RULE_BOUNDS[subject.precision],
        "engine.delta_rule=torch, or another Triton: pip install 'triton>=3.7.1'"
        if rule_kernel == "fla"
        else KEEP,
        rule,
    )


def delta_rule_trial(
    subject: Any, layout: PackedLayout, keys: int, values: int, key_width: int, value_width: int, run: Any
) -> Trial:
    """The rule `run` on a row, its decays and betas like those of a layer that has just been made."""
    total = layout.total
    given = {
        "q": randn(subject, total, keys, key_width),
        "k": randn(subject, total, keys, key_width),
        "v": randn(subject, total, values, value_width),
        "decay": -torch.rand(total, values, device=subject.device) * 0.5,
        "beta": torch.rand(total, values, device=subject.device).to(subject.dtype),
    }

    def exact(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return references.delta_rule(q, k, v, decay, beta, spans(layout))

    return Trial(run, exact, given, real=real_tokens(layout, subject.device))


def _experts(subject: Subject) -> Iterator[Check]:
    layer = subject.layer(sparse=True)
    if layer is None:
        return
    module, config = layer.mlp.experts, subject.config
    experts, hidden = config.num_moe_experts, config.hidden_size
    assert experts is not None
    total = min(subject.recipe.packing.budget, MOST_TOKENS)
    counts = _uneven(experts, total)

    def prepare() -> Trial:
        given = {"x": randn(subject, total, hidden), "probs": torch.rand(total, device=subject.device)}
        per_expert = torch.tensor(counts)

        def run(x: Tensor, probs: Tensor) -> Tensor:
            out: Tensor = module(x, per_expert, probs)[0]
            return out

        def exact(x: Tensor, probs: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
            return references.experts(x, probs, weight1, weight2, counts)

        weights = {"weight1": module.weight1, "weight2": module.weight2}
        return Trial(run, exact, given, weights)

    takes = all(grouped_takes(*weight.shape[1:]) for weight in (module.weight1, module.weight2))
    grouped = subject.device.type == "cuda" and subject.precision == "bf16" and takes
    yield Check(
        "experts",
        "grouped_mm" if grouped else "torch",
        f"{experts} experts x {config.moe_ffn_hidden_size}, hidden {hidden}, {total} tokens, some without any",
        subject.precision,
        BOUNDS[subject.precision],
        KEEP,
        prepare,
    )


def _uneven(experts: int, total: int) -> list[int]:
    """Tokens of each expert: none for every third, one for the first, the rest uneven."""
    shares = [0 if i % 3 == 1 else 1 + i % 5 for i in range(experts)]
    counts = [share * (total - 1) // sum(shares) for share in shares]
    counts[0] = 1
    counts[-1 if shares[-1] else 0] += total - sum(counts)
    return counts


def _norms(subject: Subject) -> Iterator[Check]:
    config, layer = subject.config, subject.layer()
    attention = layer.self_attention if layer is not None else None
    heads = config.num_attention_heads
    first = subject.model.decoder.layers[0].input_layernorm
    found: list[tuple[str, Any, tuple[Any, ...]]] = [("norm", first, (config.hidden_size,))]
    if attention is not None and getattr(attention, "q_layernorm", None) is not None:
        found.append(("qk_norm", attention.q_layernorm, (heads, config.kv_channels)))
    for name, module, shape in found:
        yield _norm(subject, name, module, shape)
    linear = subject.layer(linear=True)
    if linear is not None:
        yield _gated_norm(subject, linear.self_attention.out_norm)


def _gated_norm(subject: Subject, module: Any) -> Check:
    heads, width = subject.config.linear_num_value_heads, subject.config.linear_value_head_dim
    rows = min(subject.recipe.packing.budget, MOST_TOKENS)
    assert heads and width

    def prepare() -> Trial:
        with torch.no_grad():
            module.weight.normal_(1.0, 0.25)

        def exact(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            return references.rms_norm(x, weight, module.eps) * torch.nn.functional.silu(gate)

        given = {"x": randn(subject, rows, heads, width), "gate": randn(subject, rows, heads, width)}
        return Trial(lambda x, gate: module(x, gate), exact, given, {"weight": module.weight})

    sizes = f"{rows} x {heads} x {width}"
    return Check(
        "gated_norm", fused_name(subject), sizes, subject.precision, BOUNDS[subject.precision], KEEP, prepare
    )


def _norm(subject: Subject, name: str, module: Any, shape: tuple[int, ...]) -> Check:
    config, rows = subject.config, min(subject.recipe.packing.budget, MOST_TOKENS)
    zero_centred = config.layernorm_zero_centered_gamma
    before = name == "norm"  # before a branch: with what goes past it, whose gradient it may add

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
    kernel = type(module).__name__
    return Check(name, kernel, sizes + kind, subject.precision, BOUNDS[subject.precision], KEEP, prepare)


def _rotary(subject: Subject) -> Iterator[Check]:
    config, shape = subject.config, subject.rotary
    if subject.layer() is None:
        return
    layout, heads, width = (
        row_layout(subject).to(subject.device),
        config.num_attention_heads,
        config.kv_channels,
    )
    assert width is not None
    half = int(width * shape.fraction) // 2
    axes = axis_of_frequency(shape.sections, shape.interleaved) if shape.sections else [0] * half

    def prepare() -> Trial:
        positions = layout.positions.expand(max(axes) + 1, 1, -1).clone()
        positions[1:] = positions[1:] // 3 + 5  # axes that differ, as of an image
        turn = subject.model.rotary(positions)

        def run(x: Tensor) -> Tensor:
            return apply_rotary(x[:, None], *turn)[:, 0]

        def exact(x: Tensor) -> Tensor:
            return references.rotary(x, positions[:, 0], axes, shape.base)

        return Trial(run, exact, {"x": randn(subject, layout.total, heads, width)})

    sizes = f"{heads} heads, {2 * half} of {width}, {max(axes) + 1} axes"
    bound = {"bf16": 1e-2, "fp32": 1e-3}[
        subject.precision
    ]  # angles are fp32: 1e-7 of a position in the thousands
    yield Check("rotary", fused_name(subject), sizes, subject.precision, bound, KEEP, prepare)


def _swiglu(subject: Subject) -> Check:
    """Of the dense MLP, each row times a probability as experts have it."""
    rows, width = min(subject.recipe.packing.budget, MOST_TOKENS), subject.config.ffn_hidden_size
    assert width is not None

    def prepare() -> Trial:
        def exact(x: Tensor, probs: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up * probs[:, None]

        given = {"x": randn(subject, rows, 2 * width), "probs": torch.rand(rows, device=subject.device)}
        return Trial(swiglu, exact, given)

    bound = BOUNDS[subject.precision]
    return Check("swiglu", fused_name(subject), f"{rows} x {width}", subject.precision, bound, KEEP, prepare)


def _output_gate(subject: Subject) -> Check:
    heads, width = subject.config.num_attention_heads, subject.config.kv_channels
    rows, channels = min(subject.recipe.packing.budget, MOST_TOKENS), heads * (width or 0)

    def prepare() -> Trial:
        def exact(x: Tensor, gate: Tensor) -> Tensor:
            return x * gate.sigmoid()

        given = {name: randn(subject, rows, channels) for name in ("x", "gate")}
        return Trial(output_gate, exact, given)

    sizes, bound = f"{rows} x {channels}", BOUNDS[subject.precision]
    return Check("output_gate", fused_name(subject), sizes, subject.precision, bound, KEEP, prepare)


def _loss(subject: Subject) -> Check:
    layout = row_layout(subject)
    hidden, vocab = subject.config.hidden_size, subject.model.vocab_size
    rows = torch.arange(0, layout.total, 4, device=subject.device)  # a quarter has labels

    def prepare() -> Trial:
        weight = subject.model.output_layer.weight
        with torch.no_grad():
            weight.normal_(0, 2 * hidden**-0.5)  # a head that has learned something
        targets = torch.randint(vocab, (len(rows),), device=subject.device)

        def run(x: Tensor) -> Tensor:
            return subject.model._head(x, rows, targets)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return references.cross_entropy(x[:, 0], weight, rows, targets)

        x = randn(subject, layout.total, 1, hidden)
        return Trial(run, exact, {"x": x}, {"weight": weight}, exact=torch.float32)

    return Check(
        "loss",
        fused_name(subject),
        f"vocabulary {vocab}, hidden {hidden}, {len(rows)} labels",
        subject.precision,
        LOSS_BOUNDS[subject.precision],
        KEEP,
        prepare,
    )
