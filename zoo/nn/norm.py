"""RMSNorm for Megatron-Core's specs.

mcore's torch norm refuses sequence parallelism; this one marks its weight, so that mcore sums the weight's
gradient over the tensor-parallel ranks, each of which sees only its share of the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / rms(x) * weight over the last axis (Zhang and Sennrich 2019), accumulated in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden_size), any float dtype; the result has x's dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
