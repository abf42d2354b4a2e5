"""SwiGLU (Shazeer 2020) of a dense MLP and of experts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.kernels import fused


def swiglu(x: Tensor, probs: Tensor | None = None) -> Tensor:
    """x (..., 2 I), gate half first -> silu(gate) * up (..., I), each row times its `probs` (...,) where given."""
    if fused(x):
        from zoo.nn.kernels import swiglu as kernel

        return kernel.swiglu(x, probs)
    gate, up = x.chunk(2, dim=-1)
    out = F.silu(gate) * up
    return out if probs is None else (out * probs.unsqueeze(-1)).to(x.dtype)


class DenseMLP(MLP):
    """mcore's MLP of a decoder without biases, with the fused SwiGLU between its linears."""

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(T, B, hidden) -> the same, and no bias. `padding_mask` is for routers: here each token goes by itself."""
        refuse_unused("DenseMLP", unused)
        inner, _ = self.linear_fc1(hidden_states)
        out: tuple[Tensor, Tensor | None] = self.linear_fc2(swiglu(inner))
        return out


class SharedExperts(SharedExpertMLP, DenseMLP):
    """mcore's shared expert with its gate, around `DenseMLP`."""
