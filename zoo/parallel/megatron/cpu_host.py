"""Megatron-Core on a machine without a GPU.

megatron-core 0.19.2 names CUDA in a few hundred places, yet its schedules, DDP, distributed optimizer,
MoE layer and tensor-parallel layers hold no CUDA-only arithmetic. `redirected()` makes those names mean the
CPU, so that the very same engine runs under gloo: that is what tests, CI and the laptop default use.

What is redirected (nothing when a GPU is there): `device="cuda"` arguments, `Tensor.cuda()`, the
`torch.cuda.*` names that `Tensor.type()` is compared with, streams, events and synchronisation (no-ops),
and the CUDA random generator (the CPU's). Cost: about 1 microsecond per torch call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode

from zoo.parallel.megatron.replaced import replaced

_CPU = torch.device("cpu")
_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
_installed = False


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CpuMode(TorchFunctionMode):
    """Sends every request for a CUDA tensor to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **(kwargs or {}))
        return _TYPE_NAMES.get(result, result) if func is torch.Tensor.type and isinstance(result, str) else result


class _NullStream:
    """Replaces torch.cuda.Stream and torch.cuda.Event: everything is already done."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _done(self, *args: object) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _done

    def record_event(self, event: object = None) -> _NullStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


@contextmanager
def redirected() -> Iterator[bool]:
    """Make CUDA names mean the CPU inside the block where there is no GPU; the block gets whether they do. Blocks may be nested.

    It has to begin before megatron.core builds anything, and in the thread that runs the model (the redirection of `device=`
    arguments is per thread).
    """
    global _installed
    if _installed or torch.cuda.is_available():
        yield _installed
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core insists on it with TP
    stream = _NullStream()
    with ExitStack() as stack:
        names = {
            "current_device": lambda: _CPU,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda stream: nullcontext(),
            "Stream": _NullStream,
            "Event": _NullStream,
            "is_current_stream_capturing": lambda: False,
            "get_rng_state": lambda device="cuda": torch.get_rng_state(),
            "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        }
        stack.enter_context(replaced(torch.cuda, **names))
        from megatron.core.tensor_parallel import random

        names = {
            "_get_cuda_rng_state": lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
        }
        stack.enter_context(replaced(random, **names))
        stack.enter_context(_CpuMode())
        _installed = True
        try:
            yield True
        finally:
            _installed = False
