"""Checks of kernels that mix the tokens of a segment: attention, and the convolution and delta rule of Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import (
    FP32_IS_PLAIN,
    fused_name,
    make_check,
    randn,
    real_tokens,
    row_layout,
    row_shape,
    spans,
    varlen_name,
)  # fmt: skip
from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check, Trial
from zoo.nn.decoder.attention import gated_delta_net
from zoo.nn.decoder.attention.delta_inputs import delta_rule_inputs
from zoo.nn.decoder.attention.self_attention import SeqParams, attention_window
from zoo.nn.kernels.widths import fla_takes
from zoo.packing import PackedLayout
from zoo.packing.spans import BidirectionalSpans

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

DELTA_RULE_BOUNDS = {"bf16": 2e-2, "fp32": 1e-3}  # a chain of products, each rounded


@dataclass(frozen=True)
class DeltaRuleSizes:
    """Heads of a gated delta rule, and their widths."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int


def attention_checks(subject: Subject) -> Iterator[Check]:
    """Core attention on a packed row and on padded rows, the recipe's own mode first."""
    layer = subject.layer()
    if layer is None:
        return
    shape = row_shape(row_layout(subject))

    def check(name: str, rows: str, prepare: Callable[[Subject, Any], Trial], module: Any) -> Check:
        heads, groups, width = _attention_sizes(module)
        kernel = type(module.core_attention).__name__
        fix = "engine.backend=torch"
        if not kernel.startswith("TE"):
            kernel, fix = varlen_name(subject, width), FP32_IS_PLAIN
        sizes = f"{heads} heads / {groups} KV x {width}"
        return make_check(subject, name, kernel, f"{sizes}, {rows}", lambda: prepare(subject, module), fix=fix)

    both = (
        check("attention", shape, _packed_attention, layer.self_attention),
        check("attention_padded", "4 padded rows", _padded_attention, layer.self_attention),
    )
    yield from both if subject.recipe.packing.mode == "thd" else reversed(both)
    short = subject.layer(windowed=True)
    if short is not None:
        window = attention_window(subject.config, short.layer_number)
        rows = f"{shape}, window of {window}, two-way runs"
        yield check("attention_window", rows, _packed_attention, short.self_attention)


def _scale(subject: Subject, width: int) -> float:
    scale = subject.config.softmax_scale
    return width**-0.5 if scale is None else scale


def _attention_sizes(module: MegatronModule) -> tuple[int, int, int]:
    """Query heads, key-value heads, and their width of a layer's attention."""
    config = module.config
    assert config.kv_channels is not None and config.num_query_groups is not None
    return config.num_attention_heads, config.num_query_groups, config.kv_channels


def _packed_attention(subject: Subject, module: MegatronModule) -> Trial:
    """In a layer with a window, a quarter of each segment (256 tokens at most) sees itself both ways, as an image does."""
    heads, groups, width = _attention_sizes(module)
    layout = row_layout(subject).to(subject.device)
    q, k, v = (randn(subject, layout.total, n, width) for n in (heads, groups, groups))
    window = attention_window(subject.config, module.layer_number)
    middles = [(start + (stop - start) // 2, (stop - start) // 4) for start, stop in spans(layout)]
    runs = tuple((first, first + min(256, count)) for first, count in middles if count and window is not None)
    params = SeqParams.from_layout(layout, None, BidirectionalSpans(runs))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module.core_attention(q, k, v, None, attn_mask_type=module.attn_mask_type, packed_seq_params=params)
        return out.reshape(layout.total, heads, width)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return references.attention(q, k, v, spans(layout), _scale(subject, width), True, window, runs)

    return Trial(run, exact, {"q": q, "k": k, "v": v}, real=real_tokens(layout, subject.device))


def _padded_attention(subject: Subject, module: MegatronModule) -> Trial:
    heads, groups, width = _attention_sizes(module)
    lengths = sorted((min(n, 1024) for n in row_layout(subject).lengths), reverse=True)[:4]
    tokens, rows = max(lengths), len(lengths)
    q, k, v = (randn(subject, tokens, rows, n, width) for n in (heads, groups, groups))
    ends = torch.tensor(lengths, device=subject.device)
    real = torch.arange(tokens, device=subject.device)[:, None] < ends  # (T, B)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module.core_attention(q, k, v, None, attn_mask_type=module.attn_mask_type, packed_seq_params=None)
        return out.reshape(tokens, rows, heads, width)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        each = [(row * tokens, row * tokens + n) for row, n in enumerate(lengths)]
        out = references.attention(q, k, v, each, _scale(subject, width), causal=True)
        return out.unflatten(0, (rows, tokens)).transpose(0, 1)

    return Trial(run, exact, {"q": q, "k": k, "v": v}, real=real)


def linear_attention_checks(subject: Subject) -> Iterator[Check]:
    """Checks of the gated delta rule and of its inputs, where a layer has linear attention."""
    layer = subject.layer(linear=True)
    if layer is None:
        return
    config, layout = subject.config, row_layout(subject).to(subject.device)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    assert keys and values and key_width and value_width
    sizes = DeltaRuleSizes(keys, values, key_width, value_width)
    yield _inputs(subject, layout, sizes)
    yield _delta_rule(subject, layout, sizes, layer.self_attention.delta_rule)


def _inputs(subject: Subject, layout: PackedLayout, sizes: DeltaRuleSizes) -> Check:
    """Convolution and gates, of the projection of a whole row."""
    taps, heads = subject.config.linear_conv_kernel_dim, sizes.value_heads
    assert taps
    keys, values = sizes.key_heads * sizes.key_width, heads * sizes.value_width
    widths = keys, keys, values, values
    channels = sum(widths[:3])

    def prepare() -> Trial:
        def run(mixed: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
            outputs = delta_rule_inputs(mixed, weight, a_log, dt_bias, layout, widths)
            return torch.cat([output.float() for output in outputs], dim=1)

        def exact(mixed: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
            qkv, gate, beta, alpha = mixed.split([channels, values, heads, heads], dim=1)
            mixed = references.convolution(qkv, weight, spans(layout))
            decay = -a_log.exp() * torch.nn.functional.softplus(alpha + dt_bias)
            return torch.cat([mixed, gate, decay, beta.sigmoid()], dim=1)

        inputs = {
            "mixed": randn(subject, layout.total, sum(widths) + 2 * heads),
            "weight": randn(subject, channels, taps),
            "a_log": randn(subject, heads),
            "dt_bias": randn(subject, heads),
        }
        return Trial(run, exact, inputs, real=real_tokens(layout, subject.device))

    shape = f"{channels} channels, width {taps}, {heads} gates, {row_shape(layout)}"
    return make_check(subject, "delta_inputs", fused_name(subject), shape, prepare)


def _delta_rule(subject: Subject, layout: PackedLayout, sizes: DeltaRuleSizes, wanted: str) -> Check:
    """`wanted`: engine.delta_rule of the recipe."""
    probe = torch.empty(0, dtype=subject.dtype, device=subject.device)
    fla = gated_delta_net.has_fla(probe) and fla_takes(sizes.key_width, sizes.value_width)
    kernel = {"auto": "fla"}.get(wanted, wanted) if fla else "torch"

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_net.gated_delta_rule(q, k, v, decay, beta, layout, wanted)

    fixes = {
        "fla": "engine.delta_rule=torch, or another Triton: pip install 'triton>=3.7.1'",
        "flash_qla": "leave engine.delta_rule out: flash-linear-attention works the rule then",
    }
    keys, values = (sizes.key_heads, sizes.key_width), (sizes.value_heads, sizes.value_width)
    shape = f"{keys[0]} key heads x {keys[1]}, {values[0]} value heads x {values[1]}, {row_shape(layout)}"

    def prepare() -> Trial:
        return delta_rule_trial(subject.device, subject.dtype, layout, sizes, run)

    fix = fixes.get(kernel, FP32_IS_PLAIN)
    return make_check(subject, "delta_rule", kernel, shape, prepare, DELTA_RULE_BOUNDS, fix)


def delta_rule_trial(
    device: torch.device, dtype: torch.dtype, layout: PackedLayout, sizes: DeltaRuleSizes, run: Callable[..., Tensor]
) -> Trial:
    """The rule `run` on a row, its decays and betas like those of a layer that has just been made."""
    total = layout.total
    key_shape = (total, sizes.key_heads, sizes.key_width)
    inputs = {
        "q": torch.randn(*key_shape, device=device, dtype=dtype),
        "k": torch.randn(*key_shape, device=device, dtype=dtype),
        "v": torch.randn(total, sizes.value_heads, sizes.value_width, device=device, dtype=dtype),
        "decay": -torch.rand(total, sizes.value_heads, device=device) * 0.5,
        "beta": torch.rand(total, sizes.value_heads, device=device).to(dtype),
    }

    def exact(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return references.delta_rule(q, k, v, decay, beta, spans(layout))

    return Trial(run, exact, inputs, real=real_tokens(layout, device))
