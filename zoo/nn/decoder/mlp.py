"""Gated MLPs of a layer (SwiGLU or GEGLU, Shazeer 2020): dense ones, and the shared expert of all tokens.

Under full recompute a long row goes through in chunks, each recomputed by itself, as what is kept within an MLP is most of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from zoo.nn.autograd import recomputed
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.kernels import fused
from zoo.packing.cost import TOKENS_AT_ONCE


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu_pytorch_tanh": gelu_tanh}  # transformers' names


def glu(x: Tensor, activation: Activation, probs: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    """x (..., 2 I), gate half first -> activation(gate) * up (..., I), each row times its `probs` (...,) where given.

    Args:
        activation: one of ACTIVATIONS.
        end: (1,) int32: rows of x (N, 2 I) from there on have no meaning.
    """
    if fused(x):
        from zoo.nn.kernels import swiglu as kernel

        return kernel.swiglu(x, probs, activation is gelu_tanh, end)
    gate, up = x.chunk(2, dim=-1)
    out = activation(gate) * up
    return out if probs is None else (out * probs.unsqueeze(-1)).to(x.dtype)


class DenseMLP(MLP):
    """mcore's MLP of a decoder without biases, with the fused gated unit between its linears."""

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, Tensor | None]:
        """(T, B, hidden) -> the same, and no bias. `padding_mask` is for routers: here each token goes by itself."""
        refuse_unused("DenseMLP", unused)
        # Transformer Engine's FP8 is switched on around a layer, not around what its backward pass repeats.
        full = self.config.recompute_granularity == "full" and self.training and not self.config.fp8
        tokens, rows = hidden_states.shape[:2]
        if not full or tokens * rows <= TOKENS_AT_ONCE:
            return self._run(hidden_states), None
        chunks = hidden_states.split(max(1, TOKENS_AT_ONCE // rows))
        return torch.cat([recomputed(self._run, chunk) for chunk in chunks]), None

    def _run(self, hidden: Tensor) -> Tensor:
        inner, _ = self.linear_fc1(hidden)
        out: Tensor = self.linear_fc2(glu(inner, self.config.activation_func))[0]
        return out


class SharedExperts(SharedExpertMLP, DenseMLP):
    """mcore's shared expert with its gate, around `DenseMLP`."""
