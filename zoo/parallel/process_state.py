"""Settings of the whole process that a call of zoo changes, and that are restored when the call ends.

:mod:`zoo.parallel.megatron.cpu_host` and :mod:`zoo.parallel.megatron.compat` restore the names of torch and megatron-core that they
replace. This module imports no torch: settings of torch are saved only where the caller has imported it.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LOGGERS = ("", "megatron", "torch.utils.cpp_extension")


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the process at the end of the block: environment, working folder, filters of warnings and logs, hooks, random
    states, and torch's settings. Also a decorator: `@preserve_process_state()`.
    """
    restore = [_environment(), _warnings(), *map(_logger, _LOGGERS), _hooks(), _random()]
    if "torch" in sys.modules:
        restore += [_torch_settings(), _torch_random()]
    try:
        quiet()
        yield
    finally:
        for put_back in reversed(restore):
            put_back()


def quiet() -> None:
    """Suppress warnings about packages that zoo does not need, and about how megatron-core calls torch."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # megatron-core calls functions of torch.distributed by names that torch 2.14 has new ones for.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # megatron-core imports torch's C++ extension builder, which has a CUDA toolkit without a GPU to report.
    logger = logging.getLogger("torch.utils.cpp_extension")
    if _no_toolkit not in logger.filters:
        logger.addFilter(_no_toolkit)


def _no_toolkit(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found")


def _environment() -> Callable[[], None]:
    variables, folder = dict(os.environ), os.getcwd()

    def put_back() -> None:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        for name, value in variables.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if os.getcwd() != folder:
            os.chdir(folder)

    return put_back


def _warnings() -> Callable[[], None]:
    filters = list(warnings.filters)

    def put_back() -> None:
        if list(warnings.filters) != filters:
            known: Any = warnings
            known.filters[:] = filters
            known._filters_mutated()

    return put_back


def _logger(name: str) -> Callable[[], None]:
    logger = logging.getLogger(name)
    level, filters, handlers = logger.level, list(logger.filters), list(logger.handlers)

    def put_back() -> None:
        logger.setLevel(level)
        logger.filters[:], logger.handlers[:] = filters, handlers

    return put_back


def _hooks() -> Callable[[], None]:
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook

    def put_back() -> None:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks

    return put_back


def _random() -> Callable[[], None]:
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numbers)

    return put_back


def _torch_settings() -> Callable[[], None]:
    import torch

    from zoo.parallel.determinism import set_deterministic

    more: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    strict, warn = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    fill, flags = more.fill_uninitialized_memory, (cudnn.deterministic, cudnn.benchmark)
    switch = sys.getswitchinterval()
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        set_deterministic(strict, warn)
        more.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_num_threads(threads)
        sys.setswitchinterval(switch)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if device is not None:
            torch.cuda.set_device(device)

    return put_back


def _torch_random() -> Callable[[], None]:
    import torch

    state = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        torch.set_rng_state(state)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    return put_back
