"""Faults of megatron-core that zoo fixes by SHIMS. docs/megatron-faults.md names these, and those whose code zoo does not call.

A shim is applied whatever the version of megatron-core: another number does not mean that the fault is gone, and none does
harm without its fault. Where one does not take, since megatron-core has changed around it, a warning is given.

tests/unit/parallel/megatron shows every fault in the installed version, and asks for the removal of its shim or detour once it
is gone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.parallel.megatron.replaced import replaced

LAST_BROKEN = "0.19.2"  # the newest megatron-core in which tests have shown all faults, and which zoo was tried with
_applied: set[str] = set()


@dataclass(frozen=True)
class Shim:
    """A fault, described in a sentence, that is fixed inside the block of `apply`."""

    name: str
    fault: str
    apply: Callable[[], AbstractContextManager[object]]


@contextmanager
def installed() -> Iterator[None]:
    """Apply the shims inside the block, but for those that are; one that does not take is left out, with a warning."""
    with ExitStack() as stack:
        for shim in SHIMS:
            if shim.name in _applied:
                continue
            _applied.add(shim.name)
            stack.callback(_applied.discard, shim.name)
            try:
                stack.enter_context(shim.apply())
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                warnings.warn(
                    f"megatron-core {version('megatron-core')} does not take zoo's shim {shim.name} ({why}): {shim.fault}",
                    stacklevel=3,
                )
        yield


@contextmanager
def _build_gated_delta_net_without_fla() -> Iterator[None]:
    from megatron.core.ssm.gated_delta_net import common, gdn

    rule = gdn.chunk_gated_delta_rule or gdn.torch_chunk_gated_delta_rule
    with replaced(common, HAVE_FLA=True), replaced(gdn, chunk_gated_delta_rule=rule):
        yield


def _clip_in_few_kernels() -> AbstractContextManager[None]:
    from megatron.core.optimizer import clip_grads

    if clip_grads.multi_tensor_scale_tensor_impl is None and torch.cuda.is_available():
        return replaced(clip_grads, l2_norm_impl=l2_norm, multi_tensor_scale_impl=scale_in_place)
    return nullcontext()


def _replace_the_scale_of_auxiliary_losses() -> AbstractContextManager[None]:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    def set_scale(scale: Tensor) -> None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale  # whatever the shape of either

    return replaced(MoEAuxLossAutoScaler, set_loss_scale=staticmethod(set_scale))


def _sum_gradients_by_their_dtype() -> AbstractContextManager[None]:
    from megatron.core.distributed import param_and_grad_buffer

    return replaced(
        param_and_grad_buffer,
        reduce_scatter_with_fp32_accumulation=reduce_scatter,
        dist_reduce_scatter_func=reduce_scatter,
    )


def _multiply_frozen_weights_once() -> AbstractContextManager[None]:
    from megatron.core.tensor_parallel import layers

    return replaced(layers, linear_with_frozen_weight=in_two_dimensions(layers.linear_with_frozen_weight))


SHIMS = (
    Shim(
        "gated-delta-net-needs-fla",
        "GatedDeltaNet cannot be built without flash-linear-attention, not even by a subclass whose forward does not use it",
        _build_gated_delta_net_without_fla,
    ),
    Shim(
        "norms-one-by-one",
        "without Transformer Engine or Apex, the norm of the gradients reads that of every tensor from the device, one by one",
        _clip_in_few_kernels,
    ),
    Shim(
        "aux-scale-has-one-shape",
        "the scale of routers' auxiliary losses is written into the tensor that is there, which a backward pass outside of the "
        "schedules has made without an axis: the next schedule's, of one element, does not fit, and the step fails",
        _replace_the_scale_of_auxiliary_losses,
    ),
    Shim(
        "one-sum-of-gradients",
        "the last model that chooses bf16 gradients summed in fp32 chooses so for all models of the process; and such gradients are "
        "sent, summed and copied also where one rank has them all, as those of experts",
        _sum_gradients_by_their_dtype,
    ),
    Shim(
        "frozen-products-one-by-one",
        "a frozen linear makes a matrix product for each token where its input came by a transposition, as PyTorch does not fold such "
        "dimensions: half of the time of a step of adapters of Qwen3.5-35B-A3B",
        _multiply_frozen_weights_once,
    ),
)


def l2_norm(chunk: int, overflow: object, tensors: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The norm (1,) of all tensors together, in the place of `local_multi_tensor_l2_norm`."""
    norms = torch._foreach_norm(tensors[0], 2, dtype=torch.float32)  # of bf16 ones, too
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale_in_place(chunk: int, overflow: object, tensors: list[list[Tensor]], factor: float) -> None:
    """Multiply all tensors, in the place of `local_multi_tensor_scale`; megatron-core gives them as source and target."""
    if tensors[1]:  # a rank may hold no part of any gradient
        torch._foreach_mul_(tensors[1], factor)


def in_two_dimensions(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`linear_with_frozen_weight` with its input (T, ..., in) given as (N, in), which PyTorch multiplies in one product."""

    @functools.wraps(multiply)
    def flat(input: Tensor, *further: object, **options: object) -> Tensor:
        out = multiply(input.reshape(-1, input.shape[-1]), *further, **options)
        return out.view(-1, *input.shape[1:-1], out.shape[-1])  # sequence parallelism gathers T

    return flat


def reduce_scatter(
    output: Tensor, input: Tensor, *, op: object, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | _Sum | None:
    """Write this rank's part of the sum of all ranks' `input` (R * n,) to `output` (n,); bf16 is summed in fp32 and rounded once.

    megatron-core keeps one function for all models of the process, so this one goes by the dtype. bf16 values of a group of one rank
    are left alone: `output` is a view of `input`. Returns a handle to wait for if `async_op`, else None.
    """
    if input.dtype != torch.bfloat16:
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    assert op == dist.ReduceOp.SUM, op
    if group.size() == 1:
        return _Sum(None, (), output) if async_op else None
    received = torch.empty_like(input)
    work = dist.all_to_all_single(received, input, group=group, async_op=async_op)
    handle = _Sum(work, received.view(group.size(), -1).unbind(), output)
    if async_op:
        return handle
    handle.wait()
    return None


@dataclass(frozen=True)
class _Sum:
    """The parts (n,) of all ranks, being received, and the tensor for their sum."""

    work: dist.Work | None
    parts: Sequence[Tensor]
    output: Tensor

    def wait(self) -> None:
        """Make the current stream wait for the parts, then sum them up."""
        if self.work is not None:
            self.work.wait()
        if self.parts:
            total = self.parts[0].float()
            for part in self.parts[1:]:
                total += part
            self.output.copy_(total)
