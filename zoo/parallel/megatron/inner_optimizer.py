"""megatron-core's distributed optimizer around an optimizer of zoo's: what it takes from Transformer Engine's otherwise.

megatron-core 0.19 leaves fp32 copies of weights to the inner optimizer, and reads moments of any format through its
calls, only where Transformer Engine is installed. The optimizer that stands in has the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.parallel.megatron.replaced import replaced

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, OptimizerConfig


def build(
    config: OptimizerConfig, inner: Callable[..., torch.optim.Optimizer], make: Callable[[], ChainedOptimizer]
) -> ChainedOptimizer:
    """What `make` builds with megatron-core's `get_megatron_optimizer(config, ...)`, around optimizers made by `inner`.

    Args:
        config: an OptimizerConfig; it is set to be precision-aware, with the dtypes of its moments as they are.
        inner: takes the keywords of Transformer Engine's FusedAdam.
    """
    import megatron.core.optimizer as module

    config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = False  # only tells megatron-core's own loading which tensors to allocate
    with replaced(module, Adam=inner, USING_PYTORCH_OPTIMIZER=False):
        optimizer = make()
    for distributed in optimizer.chained_optimizers:
        if distributed.is_stub_optimizer:
            continue
        # In the inner optimizer's group fp32 parameters stand before the others. megatron-core counts them as they come, so
        # where dtypes are mixed it takes one parameter's state for another's.
        for group, kinds in enumerate(
            zip(distributed.model_fp32_groups, distributed.model_float16_groups, strict=True)
        ):
            for index, parameter in enumerate(parameter for kind in kinds for parameter in kind):
                distributed.model_param_group_index_map[parameter] = group, index
    return optimizer


@dataclass(frozen=True)
class HeldRange:
    """The range of a model's parameter that this rank of a distributed optimizer updates."""

    parameter: Tensor
    part: Tensor  # the inner optimizer's flat view of it
    start: int  # its first element in the flattened parameter


def held_ranges(distributed: DistributedOptimizer) -> Iterator[HeldRange]:
    """This rank's ranges in a DistributedOptimizer, without empty ones."""
    buckets = (bucket for by_dtype in distributed.gbuf_ranges for buckets in by_dtype.values() for bucket in buckets)
    for parameter, ranges in (pair for bucket in buckets for pair in bucket["param_map"].items()):
        group, index = distributed.model_param_group_index_map[parameter]
        part = distributed.optimizer.param_groups[group]["params"][index]
        if part.numel():
            yield HeldRange(parameter, part, ranges["param"].start)


def ranges_of(distributed: DistributedOptimizer) -> Iterator[tuple[Tensor, tuple[tuple[int, int], ...]]]:
    """All parameters of a DistributedOptimizer, in the same order on all its data-parallel ranks.

    Yields each with the range (first, end) of its flattened elements that each of these ranks updates
    (DistributedOptimizer._build_model_gbuf_range).
    """
    ranks = distributed.data_parallel_group.size()
    for buffer in distributed.buffers[: len(distributed.gbuf_ranges)]:
        for parameter, (first, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            share = bucket.grad_data.numel() // ranks
            starts = [bucket.offset + rank * share - first for rank in range(ranks)]
            size = end - first
            yield parameter, tuple((min(max(start, 0), size), min(max(start + share, 0), size)) for start in starts)
