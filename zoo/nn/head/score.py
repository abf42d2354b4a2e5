"""The head of a reward model: one number of each state, in the place of the vocabulary's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ScoreHead(torch.nn.Module):
    """A linear without bias to one number, as the `score` of transformers' ForSequenceClassification models.

    Every tensor-parallel rank has it whole and computes the same.
    """

    fp32_parameters = ("weight",)

    def __init__(self, config: Any) -> None:
        """`config`: megatron-core's of the decoder; the weight is normal with its init_method_std."""
        super().__init__()
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight.normal_(std=config.init_method_std))

    def forward(self, states: Tensor) -> Tensor:
        """(N, hidden) -> (N,) fp32."""
        return F.linear(states.float(), self.weight.float())[:, 0]
