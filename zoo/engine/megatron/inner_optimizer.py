"""megatron-core's distributed optimizer around an optimizer of zoo's: what it takes from Transformer Engine's otherwise.

megatron-core 0.19 leaves fp32 copies of weights to the inner optimizer, and reads moments of any format through its
calls, only where Transformer Engine is installed. The optimizer that stands in has the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def forget_reduce_scatter() -> None:
    """Let the next DDP of this process choose how it sums gradients: megatron-core keeps the last one's choice of fp32 sums."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor


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
    with (
        mock.patch.object(module, "Adam", inner),
        mock.patch.object(module, "USING_PYTORCH_OPTIMIZER", False),
    ):
        return make()
