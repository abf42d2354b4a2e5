"""Gated MLPs of a layer (SwiGLU or GEGLU, Shazeer 2020): dense, shared by all tokens, and experts as two stacked weights.

Experts are grouped matrix products: one `torch.nn.functional.grouped_mm` a projection on a GPU in half precision, for
widths that it takes; a loop over the local experts elsewhere (its CPU kernel would loop as well). mcore's SequentialMLP
loops in Python over whole modules, its grouped one needs Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.kernels import fused
from zoo.nn.kernels.widths import grouped_takes


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu_pytorch_tanh": gelu_tanh}  # transformers' names


def glu(x: Tensor, activation: Activation, probs: Tensor | None = None) -> Tensor:
    """x (..., 2 I), gate half first -> activation(gate) * up (..., I), each row times its `probs` (...,) where given.

    `activation`: one of ACTIVATIONS.
    """
    if fused(x):
        from zoo.nn.kernels import swiglu as kernel

        return kernel.swiglu(x, probs, gelu=activation is gelu_tanh)
    gate, up = x.chunk(2, dim=-1)
    out = activation(gate) * up
    return out if probs is None else (out * probs.unsqueeze(-1)).to(x.dtype)


class DenseMLP(MLP):
    """mcore's MLP of a decoder without biases, with the fused gated unit between its linears."""

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(T, B, hidden) -> the same, and no bias. `padding_mask` is for routers: here each token goes by itself."""
        refuse_unused("DenseMLP", unused)
        inner, _ = self.linear_fc1(hidden_states)
        out: tuple[Tensor, Tensor | None] = self.linear_fc2(glu(inner, self.config.activation_func))
        return out


class SharedExperts(SharedExpertMLP, DenseMLP):
    """mcore's shared expert with its gate, around `DenseMLP`."""


class GroupedExperts(MegatronModule):
    """Gated experts: `weight1` (E, 2I, hidden), gate half first, and `weight2` (E, hidden, I).

    E is this rank's share of the experts, I its share of an expert's width under expert tensor parallelism.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.moe_ffn_hidden_size is not None
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = (
            pg_collection.ep,
            pg_collection.expt_tp,
            pg_collection.expt_dp,
        )
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        factory: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight1 = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * width, config.hidden_size, **factory)
        )
        self.weight2 = torch.nn.Parameter(
            torch.empty(num_local_experts, config.hidden_size, width, **factory)
        )
        self.lora = (
            torch.nn.ModuleDict()
        )  # by a weight's name, its zoo.nn.decoder.lora.ExpertAdapter where it has one
        same_groups = (
            config.expert_model_parallel_size == 1 and self.tp_group.size() == pg_collection.tp.size()
        )
        for weight, axis, init in (
            (self.weight1, 1, config.init_method),
            (self.weight2, 2, config.output_layer_init_method),
        ):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)
            weight.allreduce = same_groups  # type: ignore[attr-defined]  # False: the expert data-parallel group
            if config.perform_initialization and init is not None:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init(weight)

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (N, hidden) sorted by expert, tokens_per_expert (E,) int, probs (N,) -> (N, hidden), None."""
        product = _product(tokens_per_expert)
        inner = self._project("weight1", hidden, product)
        return self._project("weight2", glu(inner, self.config.activation_func, probs), product), None

    def _project(self, name: str, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x (N, in) by one of the weights, and by its adapter."""
        out = product(x, getattr(self, name))
        return out + self.lora[name](x, product) if name in self.lora else out

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The two weights with the expert axis cut over EP and the width cut over expert TP.

        `weight1` is saved as its two halves, so that it can be read under another expert TP size.
        """
        lead = len(sharded_offsets)

        def shard(key: str, tensor: Tensor, axis: int, replica: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key,
                tensor,
                *sharded_offsets,
                (lead, self.ep_group.rank(), self.ep_group.size()),
                (lead + axis, self.tp_group.rank(), self.tp_group.size()),
                replica_id=replica,
                prepend_axis_num=lead,
            )

        def halves(
            key: str, tensor: Tensor, replica: Any, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            gate, up = tensor.chunk(2, dim=1)
            return [shard(f"{key}_gate", gate, 1, replica), shard(f"{key}_up", up, 1, replica)]

        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, dim=1)

        replica = (0, 0, self.dp_group.rank())
        first, second = f"{prefix}weight1", f"{prefix}weight2"
        return {
            first: ShardedTensorFactory(first, self.weight1, halves, whole, replica),
            second: shard(second, self.weight2, 2, replica),
        }


def _product(tokens_per_expert: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """x (N, in) sorted by expert, weight (E, out, in) -> (N, out), for so many tokens an expert."""
    ends: list[Tensor] = []
    counts: list[int] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if grouped(x, weight):
            if not ends:
                ends.append(tokens_per_expert.to(x.device, non_blocking=True).cumsum(0).to(torch.int32))
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends[0])
        if not counts:  # the host waits for them
            counts.extend(tokens_per_expert.tolist())
        return torch.cat([F.linear(part, weight[e]) for e, part in enumerate(x.split(counts))])

    return product


def grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether x (N, in) by weight (E, out, in) is one `grouped_mm`: a GPU, half precision, widths that it takes."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and grouped_takes(*weight.shape[1:])
