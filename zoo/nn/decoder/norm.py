"""RMSNorm for Megatron-Core's specs.

mcore's torch norm refuses sequence parallelism; this one marks its weight, so that mcore sums the weight's
gradient over the tensor-parallel ranks, each of which sees only its share of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.kernels import fused


class RMSNorm(torch.nn.Module):
    """y = x / rms(x) * weight over the last axis (Zhang and Sennrich 2019), accumulated in fp32.

    Zero-centred (layernorm_zero_centered_gamma), the weight is what is added to 1.
    """

    fp32_parameters = ("weight",)

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden_size), any float dtype; the result has x's dtype."""
        if fused(x):
            from zoo.nn.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, self.zero_centered)
        if self.zero_centered or self.weight.dtype != x.dtype:  # in fp32: 1 + weight has too few digits in bf16
            weight = self.weight.float() + (1.0 if self.zero_centered else 0.0)
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ResidualRMSNorm(RMSNorm):
    """The norm before a branch of a layer; where kernels are fused it gives what goes past the branch as well.

    megatron-core takes that for the residual. So its gradient is added to the norm's by the norm's kernel.
    """

    def forward(self, x: Tensor) -> Any:
        """x: (..., hidden_size) -> its norm, or its norm and x."""
        if not fused(x):
            return super().forward(x)
        from zoo.nn.kernels.norm import rms_norm_residual

        return rms_norm_residual(x, self.weight, self.eps, self.zero_centered)
