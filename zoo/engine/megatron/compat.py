"""Faults of megatron-core that zoo meets: SHIMS fixes some, `zoo.engine.megatron.avoided` lists the others, whose code zoo does not call.

A shim is applied whatever the version of megatron-core: another number does not mean that the fault is gone. Where a shim
would harm without its fault, a probe asks megatron-core itself. Where the shim does not take, since megatron-core has
changed around it, no run starts if data or safety hang on it, and a warning is given otherwise.

tests/unit/engine/megatron shows every fault in the installed version, and asks for the removal of its shim or detour once it
is gone. docs/megatron-faults.md names each in a table. zoo/engine/megatron/replacements.py has what is called in the place of faulty functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from zoo.engine.megatron import probes, replacements
from zoo.engine.megatron.avoided import Fault
from zoo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shim(Fault):
    """A fault that `apply` fixes.

    `works` says, at each start and after `apply`, whether megatron-core now does the right thing. `gone` says before it
    whether it does so by itself; None where the shim does no harm then, and stays. `risk`: what a run without the shim
    would risk, for the sentence that refuses it; None where it would only be slower, or fail by itself.
    """

    apply: Callable[[], None]
    works: Callable[[], bool] = lambda: True
    gone: Callable[[], bool] | None = None
    risk: str | None = None


_applied: set[str] = set()
_gone: dict[str, bool] = {}  # what the probes said when they were last asked
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, what was there


def install(*, checked: bool = False) -> None:
    """Apply the shims, once a process.

    `checked`: an earlier call of this process has made the probes (some write files), whose answers still hold.

    Raises UserError where one that data or safety hang on does not take with the installed megatron-core.
    """
    for shim in SHIMS:
        if shim.name in _applied:
            continue
        known = _gone.get(shim.name) if checked else None
        gone = _gone[shim.name] = _answer(shim.gone) if known is None else known
        if not gone:
            try:
                shim.apply()
                fits = known is not None or shim.works()
                why = "the fault is still there"
            except Exception as error:
                fits, why = False, f"{type(error).__name__}: {error}"
            if not fits:
                _refuse(shim, why)
        _applied.add(shim.name)


def _replace(owner: Any, **values: Any) -> None:
    """Put values in the place of an owner's own, for as long as the shims are applied.

    Raises AttributeError where it no longer has what is to be replaced.
    """
    for name, value in values.items():
        getattr(owner, name)
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


def _answer(probe: Callable[[], bool] | None) -> bool:
    """What a probe answers; a probe that megatron-core does not fit any more answers nothing."""
    if probe is None:
        return False
    try:
        return probe()
    except Exception:
        return False


def _refuse(shim: Shim, why: str) -> None:
    found, why = version("megatron-core"), why.partition("\n")[0][:300]
    problem = f"megatron-core {found} does not take zoo's shim {shim.name} ({why})"
    if shim.risk is not None:
        raise UserError(f"{problem}: {shim.risk}; install megatron-core {shim.last_broken}")
    warnings.warn(f"{problem}: {shim.fault}", stacklevel=3)


@contextmanager
def installed(*, checked: bool = False) -> Iterator[None]:
    """:func:`install` for a block. What was applied before it stays so."""
    before, mark = set(_applied), len(_replaced)
    try:
        install(checked=checked)
        yield
    finally:
        while len(_replaced) > mark:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)
        _applied.intersection_update(before)


def _save_without_a_manager() -> None:
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    _replace(filesystem_async, _results_queue=queue.Queue())


def _has_its_queue() -> bool:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async.get_write_results_queue() is filesystem_async._results_queue


def _load_without_pickles() -> None:
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    from zoo.engine.megatron import safe_reading

    _replace(
        serialization,
        _get_filesystem_reader=safe_reading.reader,
        load_common_state_dict=safe_reading.common_state,
    )
    _replace(
        torch_dist, _get_filesystem_reader=safe_reading.reader, MCoreLoadPlanner=safe_reading.SafePlanner
    )


def _nothing_runs() -> bool:
    return not probes.pickles_that_ran()


def _build_gated_delta_net_without_fla() -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    _replace(common, HAVE_FLA=True)
    rule = gdn.chunk_gated_delta_rule or gdn.torch_chunk_gated_delta_rule
    _replace(gdn, chunk_gated_delta_rule=rule)


def _save_every_bucket_from_its_start() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer: Any = DistributedOptimizer
    original = optimizer.sharded_param_state_fully_reshardable

    @functools.wraps(original)
    def sharded(self: Any, *arguments: Any, **options: Any) -> Any:
        whole = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = replacements.ranges_without_padding(buffer)
            return original(self, *arguments, **options)
        finally:
            for buffer, ranges in zip(self.buffers, whole, strict=True):
                buffer.param_index_map = ranges

    _replace(optimizer, sharded_param_state_fully_reshardable=sharded)


def _clip_in_few_kernels() -> None:
    from megatron.core.optimizer import clip_grads

    if clip_grads.multi_tensor_scale_tensor_impl is None and torch.cuda.is_available():
        _replace(
            clip_grads, l2_norm_impl=replacements.l2_norm, multi_tensor_scale_impl=replacements.scale_in_place
        )


def _set_the_scale_of_auxiliary_losses_anew() -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    _replace(MoEAuxLossAutoScaler, set_loss_scale=staticmethod(replacements.set_aux_scale))


def _sum_gradients_by_their_dtype() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    ours = replacements.reduce_scatter
    _replace(
        param_and_grad_buffer,
        reduce_scatter_with_fp32_accumulation=ours,
        dist_reduce_scatter_func=ours,
    )


def _multiply_frozen_weights_once() -> None:
    from megatron.core.tensor_parallel import layers

    _replace(
        layers, linear_with_frozen_weight=replacements.in_two_dimensions(layers.linear_with_frozen_weight)
    )


SHIMS = (
    Shim(
        name="save-without-a-manager",
        fault="a save in this process's own threads starts a spawned manager process for its results: half a GiB "
        "a rank, and EOFError in a script without `if __name__ == '__main__':`, which the process imports again",
        last_broken="0.19.2",
        apply=_save_without_a_manager,
        works=_has_its_queue,
    ),
    Shim(
        name="checkpoints-run-pickles",
        fault="loading a checkpoint unpickles whatever its index, its common state and its objects hold, so a file can "
        "run anything",
        last_broken="0.19.2",
        apply=_load_without_pickles,
        works=_nothing_runs,
        risk="a checkpoint's file could run anything",
    ),
    Shim(
        name="gated-delta-net-needs-fla",
        fault="GatedDeltaNet cannot be built without flash-linear-attention, not even by a subclass whose forward "
        "does not use it",
        last_broken="0.19.2",
        apply=_build_gated_delta_net_without_fla,
    ),
    Shim(
        name="optimizer-state-shifted-by-padding",
        fault="a fully reshardable save joins a buffer's buckets without the padding that ends them and cuts "
        "parameters out of it by offsets that count it: from the second bucket on, moments and fp32 weights are shifted",
        last_broken="0.19.2",
        apply=_save_every_bucket_from_its_start,
        works=probes.moments_are_saved_whole,
        gone=probes.moments_are_saved_whole,
        risk="checkpoints would hold other moments and weights than the run's",
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
