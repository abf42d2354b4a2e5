"""The experts of a layer as two stacked weights, and grouped matrix products with their gradients: each row by the weight of its expert.

mcore's SequentialMLP loops in Python over whole modules, its grouped one needs Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.decoder.experts import hopper, products
from zoo.nn.decoder.experts.exchange import Permutation, gather_rows, sum_rows
from zoo.nn.decoder.experts.products import multiply
from zoo.nn.decoder.mlp import glu
from zoo.nn.kernels import has_triton

# By weight: a function that computes its gradient, and leaves so many multiprocessors (SMs) free.
type Later = dict[Tensor, Callable[[int], Tensor]]


class GroupedExperts(MegatronModule):
    """Gated experts: `weight1` (E, 2I, hidden), gate half first, and `weight2` (E, hidden, I).

    E is this rank's share of the experts, I its share of an expert's width under expert tensor parallelism.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.moe_ffn_hidden_size is not None
        self.num_local_experts = num_local_experts
        self.accumulates = False  # whether weight gradients are accumulated in DDP's buffers here
        self.ep_group, self.tp_group, self.dp_group = (pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp)
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.weight1 = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * width, config.hidden_size, dtype=dtype, device=device)
        )
        self.weight2 = torch.nn.Parameter(
            torch.empty(num_local_experts, config.hidden_size, width, dtype=dtype, device=device)
        )
        self.lora = torch.nn.ModuleDict()  # by a weight's name, its zoo.nn.decoder.lora.ExpertAdapter where it has one
        same_groups = config.expert_model_parallel_size == 1 and self.tp_group.size() == pg_collection.tp.size()
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
        self,
        hidden: Tensor,
        bounds: Tensor,
        probs: Tensor,
        gradient_only: bool = False,
        later: Later | None = None,
        permutation: Permutation | None = None,
        free_sms: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (N, hidden) sorted by expert, probs (N,) -> (N, hidden), None.

        Args:
            bounds: (E + 1,) int32, where the rows of each expert begin, and where the last ones end.
            gradient_only: the values are not read, as where the backward pass recomputes the experts.
            later: as of `grouped_product`.
            permutation: hidden is (M, hidden), as tokens come, and so is what is returned, the sum of each token's experts; `bounds`
                are the permutation's.
            free_sms: as of `zoo.nn.decoder.experts.products.multiply`, for the first product.
        """
        inner = self._project("weight1", hidden, GroupedRows(bounds, taken=permutation, free_sms=free_sms), later=later)
        end = None if permutation is None else permutation.end
        inner = glu(inner, self.config.activation_func, probs, end)
        return self._project("weight2", inner, GroupedRows(bounds, summed=permutation), gradient_only, later), None

    def leaves_room(self, like: Tensor, rows: int) -> bool:
        """Whether `forward` takes no time for rows behind the last expert's, so that there may be room for the most that can come, `rows`.

        `like`: a tensor on the device and in the dtype of the tokens.
        """
        return not self.lora and all(hopper.supports(like, weight, rows) for weight in (self.weight1, self.weight2))

    def _project(
        self, name: str, x: Tensor, rows: GroupedRows, gradient_only: bool = False, later: Later | None = None
    ) -> Tensor:
        """Multiply x by one of the weights, and add the product of its adapter."""
        weight = getattr(self, name)
        if name in self.lora:
            a, b, scale = self.lora[name](x.is_cuda)
            return lora_product(x, weight, a, b, scale, rows, gradient_only)
        total = weight.main_grad if self.accumulates and weight.requires_grad else None
        return grouped_product(x, weight, rows, gradient_only, total, later)

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The two weights with the expert axis cut over EP and the width cut over expert TP.

        `weight1` is saved as its two halves, so that it can be read under another expert TP size.
        """
        lead = len(sharded_offsets)

        def shard(key: str, tensor: Tensor, axis: int, replica: tuple[int, ...]) -> ShardedTensor:
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
            key: str, tensor: Tensor, replica: tuple[int, ...], flattened_range: slice | None
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


@dataclass(frozen=True)
class GroupedRows:
    """N rows of a grouped product, sorted by expert."""

    bounds: Tensor  # (E + 1,) int32, where the rows of each expert begin, and where the last ones end: N
    taken: Permutation | None = None  # the product is given M tokens, whose rows these are; None: the rows themselves
    summed: Permutation | None = None  # the product gives the sum of each of M tokens' rows; None: the rows themselves
    free_sms: int = 0  # as of `products.multiply`, for the product, not for its gradients

    def result(self, product: Tensor) -> Tensor:
        """The output for a product of each row: the product itself, or its sums by token."""
        return product if self.summed is None else sum_rows(product, self.summed.places)

    def input_gradient(self, grad: Tensor) -> Tensor:
        """The input's gradient, from that of each row of the product."""
        return grad if self.taken is None else sum_rows(grad, self.taken.places)

    def placeholder(self, x: Tensor, weight: Tensor) -> Tensor:
        """A tensor of the result's shape, without values."""
        count = len(x if self.taken is None else self.taken.tokens)
        count = count if self.summed is None else len(self.summed.places)
        return x.new_empty(1).expand(count, weight.shape[1])


def _tokens(permutation: Permutation | None) -> Tensor | None:
    return None if permutation is None else permutation.tokens


def grouped_product(
    x: Tensor,
    weight: Tensor,
    rows: GroupedRows,
    gradient_only: bool = False,
    total: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """The product of each row with the weight of its expert: x (N, in) sorted by expert, weight (E, out, in) -> (N, out).

    Args:
        rows: where each expert's rows are; x or what is returned may be tokens', (M, in) or (M, out).
        gradient_only: the values are not read, so they are not computed; the gradient is right.
        total: (E, out, in), DDP's buffer of the parameter `weight`: the weight gradient is accumulated there, and what autograd gets
            is not read.
        later: gets a function that computes the weight gradient, and autograd gets none: the caller sends the gradient of x first, and calls the
            function while that travels.
    """
    return _GroupedProduct.apply(x, weight, rows, gradient_only, total, later)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        rows: GroupedRows,
        gradient_only: bool,
        total: Tensor | None,
        later: Later | None,
    ) -> Tensor:
        ctx.rows, ctx.total, ctx.later = rows, total, later
        ctx.parameter = weight if total is not None or later is not None else None
        placeholder = rows.placeholder(x, weight)
        x, ctx.of_x = products.gathered(x, _tokens(rows.taken), weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        if gradient_only:
            return placeholder
        return rows.result(multiply(x, weight, rows.bounds, ctx.of_x, rows.free_sms))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), rows = ctx.saved_tensors, ctx.rows
        grad, of_grad = products.gathered(grad.contiguous(), _tokens(rows.summed), weight)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = rows.input_gradient(multiply(grad, weight.transpose(1, 2), rows.bounds, of_grad))

        def of_weight(free_sms: int = 0) -> Tensor:
            to_weight = products.weight_gradient(grad, x, weight, rows.bounds, ctx.total, of_grad, ctx.of_x, free_sms)
            if ctx.total is not None:
                ctx.parameter.grad_added_to_main_grad = True  # read by megatron-core's DDP
            return to_weight

        to_weight = None
        if ctx.needs_input_grad[1] and ctx.later is not None:
            ctx.later[ctx.parameter] = of_weight
        elif ctx.needs_input_grad[1]:
            to_weight = of_weight()
        return to_x, to_weight, None, None, None, None


def lora_product(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, rows: GroupedRows, gradient_only: bool = False
) -> Tensor:
    """`grouped_product` with a frozen weight and a low-rank adapter (Hu et al. 2021): x weight^T + scale (x a^T) b^T -> (N, out).

    Args:
        x: (N, in) sorted by expert.
        weight: (E, out, in).
        a: (E, rank, in).
        b: (E, out, rank).
        rows, gradient_only: as of `grouped_product`.
    """
    return _LoraProduct.apply(x, weight, a, b, scale, rows, gradient_only)


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        rows: GroupedRows,
        gradient_only: bool,
    ) -> Tensor:
        assert not weight.requires_grad
        placeholder = rows.placeholder(x, weight)
        if rows.taken is not None:
            x = gather_rows(x, rows.taken.tokens)
        narrow = multiply(x, a, rows.bounds) * scale
        ctx.save_for_backward(x, weight, a, b, narrow)
        ctx.scale, ctx.rows = scale, rows
        if gradient_only:
            return placeholder
        product = multiply(x, weight, rows.bounds, free_sms=rows.free_sms)
        return rows.result(_add_lowrank(product, narrow, b, rows.bounds))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, a, b, narrow), rows = ctx.saved_tensors, ctx.rows
        grad, bounds = grad.contiguous(), rows.bounds
        if rows.summed is not None:
            grad = gather_rows(grad, rows.summed.tokens)
        to_narrow = multiply(grad, b.transpose(1, 2), bounds) * ctx.scale
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = multiply(grad, weight.transpose(1, 2), bounds)
            to_x = rows.input_gradient(_add_lowrank(to_x, to_narrow, a.transpose(1, 2), bounds))
        to_a = products.weight_gradient(to_narrow, x, a, bounds)
        to_b = products.weight_gradient(grad, narrow, b, bounds)
        return to_x, None, to_a, to_b, None, None, None


def _add_lowrank(out: Tensor, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """out (N, width) += the grouped product of x (N, rank) and weight (E, width, rank)."""
    if products.grouped(x, weight) and has_triton():
        from zoo.nn.kernels.experts import RANKS, add_lowrank

        if weight.shape[2] <= RANKS:
            return add_lowrank(out, x, weight, bounds[1:])
    return out.add_(multiply(x, weight, bounds))
