"""Faults of megatron-core that zoo meets: SHIMS fixes some, `zoo.parallel.megatron.avoided` lists the others, whose code zoo does not call.

A shim is applied whatever the version of megatron-core: another number does not mean that the fault is gone, and none does
harm without its fault. Where one does not take, since megatron-core has changed around it, a warning is given.

tests/unit/parallel/megatron shows every fault in the installed version, and asks for the removal of its shim or detour once it
is gone. docs/megatron-faults.md names each in a table. zoo/parallel/megatron/replacements.py has what is called in the place of faulty functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from zoo.parallel.megatron import replacements
from zoo.parallel.megatron.avoided import Fault


@dataclass(frozen=True, kw_only=True)
class Shim(Fault):
    """A fault that `apply` fixes."""

    apply: Callable[[], None]


_applied: set[str] = set()
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, what was there


def install() -> None:
    """Apply the shims, once a process; one that does not take with the installed megatron-core is left out, with a warning."""
    for shim in SHIMS:
        if shim.name in _applied:
            continue
        try:
            shim.apply()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            warnings.warn(
                f"megatron-core {version('megatron-core')} does not take zoo's shim {shim.name} ({why}): {shim.fault}",
                stacklevel=2,
            )
        _applied.add(shim.name)


def _replace(owner: Any, **values: Any) -> None:
    """Put values in the place of an owner's own, for as long as the shims are applied.

    Raises AttributeError where it no longer has what is to be replaced.
    """
    for name, value in values.items():
        getattr(owner, name)
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


@contextmanager
def installed() -> Iterator[None]:
    """:func:`install` for a block. What was applied before it stays so."""
    before, mark = set(_applied), len(_replaced)
    try:
        install()
        yield
    finally:
        while len(_replaced) > mark:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)
        _applied.intersection_update(before)


def _build_gated_delta_net_without_fla() -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    _replace(common, HAVE_FLA=True)
    rule = gdn.chunk_gated_delta_rule or gdn.torch_chunk_gated_delta_rule
    _replace(gdn, chunk_gated_delta_rule=rule)


def _clip_in_few_kernels() -> None:
    from megatron.core.optimizer import clip_grads

    if clip_grads.multi_tensor_scale_tensor_impl is None and torch.cuda.is_available():
        _replace(clip_grads, l2_norm_impl=replacements.l2_norm, multi_tensor_scale_impl=replacements.scale_in_place)


def _set_the_scale_of_auxiliary_losses_anew() -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    _replace(MoEAuxLossAutoScaler, set_loss_scale=staticmethod(replacements.set_aux_scale))


def _sum_gradients_by_their_dtype() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    ours = replacements.reduce_scatter
    _replace(param_and_grad_buffer, reduce_scatter_with_fp32_accumulation=ours, dist_reduce_scatter_func=ours)


def _multiply_frozen_weights_once() -> None:
    from megatron.core.tensor_parallel import layers

    _replace(layers, linear_with_frozen_weight=replacements.in_two_dimensions(layers.linear_with_frozen_weight))


SHIMS = (
    Shim(
        name="gated-delta-net-needs-fla",
        fault="GatedDeltaNet cannot be built without flash-linear-attention, not even by a subclass whose forward "
        "does not use it",
        last_broken="0.19.2",
        apply=_build_gated_delta_net_without_fla,
    ),
    Shim(
        name="norms-one-by-one",
        fault="without Transformer Engine or Apex, the norm of the gradients reads that of every tensor from the device, one by one",
        last_broken="0.19.2",
        apply=_clip_in_few_kernels,
    ),
    Shim(
        name="aux-scale-has-one-shape",
        fault="the scale of routers' auxiliary losses is written into the tensor that is there, which a backward pass outside of the "
        "schedules has made without an axis: the next schedule's, of one element, does not fit, and the step fails",
        last_broken="0.19.2",
        apply=_set_the_scale_of_auxiliary_losses_anew,
    ),
    Shim(
        name="one-sum-of-gradients",
        fault="the last model that chooses bf16 gradients summed in fp32 chooses so for all models of the process; and such gradients are "
        "sent, summed and copied also where one rank has them all, as those of experts",
        last_broken="0.19.2",
        apply=_sum_gradients_by_their_dtype,
    ),
    Shim(
        name="frozen-products-one-by-one",
        fault="a frozen linear makes a matrix product for each token where its input came by a transposition, as PyTorch does not fold such "
        "dimensions: half of the time of a step of adapters of Qwen3.5-35B-A3B",
        last_broken="0.19.2",
        apply=_multiply_frozen_weights_once,
    ),
)
