"""Megatron-Core on a machine without a GPU.

megatron-core 0.19.2 names CUDA in a few hundred places, yet its schedules, DDP, distributed optimizer,
MoE layer and tensor-parallel layers hold no CUDA-only arithmetic. `install()` makes those names mean the
CPU, so that the very same engine runs under gloo: that is what tests, CI and the laptop default use.

What is redirected (nothing when a GPU is there): `device="cuda"` arguments, `Tensor.cuda()`, the
`torch.cuda.*` names that `Tensor.type()` is compared with, streams, events and synchronisation (no-ops),
and the CUDA random generator (the CPU's). Cost: about 1 microsecond per torch call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_ABSENT = object()
_installed: _CpuMode | None = None
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, what was there


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CpuMode(TorchFunctionMode):
    """Sends every request for a CUDA tensor to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(args[0])
            return _TYPE_NAMES.get(name, name)
        return func(*args, **(kwargs or {}))


class _NullStream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: everything is already done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def is_installed() -> bool:
    """Whether CUDA names mean the CPU in this process."""
    return _installed is not None


def install() -> bool:
    """Make CUDA names mean the CPU where there is no GPU; returns whether it did.

    Safe to call twice. It has to run before megatron.core builds anything, and in the thread that
    runs the model (the redirection of `device=` arguments is per thread).
    """
    global _installed
    if _installed is not None:
        return True
    if torch.cuda.is_available():
        return False
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core insists on it with TP
    _redirect_torch_cuda()
    _redirect_random_state()
    _installed = _CpuMode()
    _installed.__enter__()
    return True


def uninstall() -> None:
    """Have CUDA names mean what they did; in the thread of :func:`install`."""
    global _installed
    if _installed is None:
        return
    _installed.__exit__(None, None, None)
    _installed = None
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


@contextlib.contextmanager
def redirected() -> Iterator[bool]:
    """:func:`install` for a block; whether CUDA names mean the CPU in it. What was installed before it stays so."""
    before = is_installed()
    on_cpu = install()
    try:
        yield on_cpu
    finally:
        if not before:
            uninstall()


def _put(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _redirect_torch_cuda() -> None:
    stream = _NullStream()
    cuda: Any = torch.cuda
    _put(cuda, "current_device", lambda: _CPU)
    _put(cuda, "set_device", lambda device: None)
    _put(cuda, "synchronize", lambda device=None: None)
    _put(cuda, "empty_cache", lambda: None)
    _put(cuda, "current_stream", lambda device=None: stream)
    _put(cuda, "default_stream", lambda device=None: stream)
    _put(cuda, "stream", lambda stream: contextlib.nullcontext())
    _put(cuda, "Stream", _NullStream)
    _put(cuda, "Event", _NullStream)
    _put(cuda, "is_current_stream_capturing", lambda: False)
    _put(cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state())
    _put(cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state))


def _redirect_random_state() -> None:
    from megatron.core.tensor_parallel import random as mcore_random

    module: Any = mcore_random
    _put(module, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state())
    _put(module, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
