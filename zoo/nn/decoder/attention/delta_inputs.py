"""What the gated delta rule takes, from a layer's projection: a causal convolution with SiLU that starts anew in every segment, and gates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.kernels import fused
from zoo.packing import PackedLayout


def delta_rule_inputs(
    mixed: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor, layout: PackedLayout, widths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the rule takes of a packed row's projection mixed (T, Q + K + V + G + 2 H), the parts of which stand in this order.

    taps (Q + K + V, K'): of the convolution; a_log, dt_bias (H,); widths: Q, K, V and G -> queries, keys and values behind convolution and
    SiLU, each dense; the output gate as it is; decay (T, H) fp32 and beta (T, H).
    """
    if fused(mixed) and taps.shape[1] <= 4:
        from zoo.nn.kernels.conv import delta_inputs

        return delta_inputs(mixed, taps, a_log, dt_bias, layout.positions[0], widths)
    heads = len(a_log)
    *qkv, gate, beta, alpha = mixed.split([*widths, heads, heads], dim=-1)
    parts = zip(qkv, taps.split(list(widths[:3])), strict=True)
    query, key, value = (causal_convolution(part, taps, layout) for part, taps in parts)
    return query, key, value, gate, *gates(alpha, beta, a_log, dt_bias)


def gates(alpha: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H) each -> the log of the decay, fp32, and beta."""
    return -a_log.float().exp() * F.softplus(alpha.float() + dt_bias), beta.sigmoid()


def causal_convolution(x: Tensor, weight: Tensor, layout: PackedLayout) -> Tensor:
    """silu(depthwise causal convolution) of x (T, C) by weight (C, K), from zeros at each start of a segment."""
    if fused(x) and weight.shape[1] <= 4:
        from zoo.nn.kernels.conv import causal_conv_silu

        return causal_conv_silu(x, weight, layout.positions[0])
    width = weight.shape[1]
    index = layout.positions[0, :, None]
    out = x * weight[:, -1]
    for back in range(1, width):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + torch.where(index >= back, earlier, 0) * weight[:, width - 1 - back]
    return F.silu(out)
