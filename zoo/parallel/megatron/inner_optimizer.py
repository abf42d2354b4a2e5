"""megatron-core's distributed optimizer around an optimizer of zoo's: what it takes from Transformer Engine's otherwise.

megatron-core 0.19 leaves fp32 copies of weights to the inner optimizer, and reads moments of any format through its
calls, only where Transformer Engine is installed. The optimizer that stands in has the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.parallel.megatron.replaced import replaced


def build(config: Any, inner: Callable[..., torch.optim.Optimizer], make: Callable[[], Any]) -> Any:
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
        made = make()
    for one in made.chained_optimizers:
        if not one.is_stub_optimizer:
            _find_places(one)
    return made


def _find_places(one: Any) -> None:
    """Correct the place of each parameter among those of the inner optimizer's group: fp32 ones stand before the others there.

    megatron-core counts them as they come, so where dtypes are mixed it takes one parameter's state for another's.
    """
    for group, kinds in enumerate(zip(one.model_fp32_groups, one.model_float16_groups, strict=True)):
        for place, parameter in enumerate(parameter for kind in kinds for parameter in kind):
            one.model_param_group_index_map[parameter] = group, place


@dataclass(frozen=True)
class HeldRange:
    """The range of a model's parameter that this rank of a distributed optimizer updates."""

    parameter: Tensor
    part: Tensor  # the inner optimizer's flat view of it
    start: int  # its first element in the flattened parameter


def held_ranges(one: Any) -> Iterator[HeldRange]:
    """This rank's ranges in a DistributedOptimizer, without empty ones."""
    for of_buffer in one.gbuf_ranges:
        for buckets in of_buffer.values():
            for parameter, where in ((p, w) for bucket in buckets for p, w in bucket["param_map"].items()):
                group, place = one.model_param_group_index_map[parameter]
                part = one.optimizer.param_groups[group]["params"][place]
                if part.numel():
                    yield HeldRange(parameter, part, where["param"].start)


def ranges_of(one: Any) -> Iterator[tuple[Tensor, tuple[tuple[int, int], ...]]]:
    """All parameters of a DistributedOptimizer, in the same order on all its data-parallel ranks.

    Yields each with the range (first, end) of its flattened elements that each of these ranks updates
    (DistributedOptimizer._build_model_gbuf_range).
    """
    ranks = one.data_parallel_group.size()
    for buffer in one.buffers[: len(one.gbuf_ranges)]:
        for parameter, (first, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            share = bucket.grad_data.numel() // ranks
            places = [bucket.offset + rank * share - first for rank in range(ranks)]
            size = end - first
            yield parameter, tuple((min(max(at, 0), size), min(max(at + share, 0), size)) for at in places)
