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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

# First words of what loggers say in vain: megatron-core imports torch's C++ extension builder, which has a CUDA toolkit without a GPU
# to report; transformers knows neither `mrope_section` nor tokens of the thinker in the config of a talker, which zoo checks itself.
_UNSAID: dict[str, str | tuple[str, ...]] = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "transformers.configuration_utils": "Model config: ",
    "transformers.modeling_rope_utils": (
        "Unrecognized keys in `rope_parameters`",
        "The explicitly set RoPE scaling factor",  # of published long contexts
        "`rope_parameters`'s ",  # of numbers beyond what is common, by which it turns all the same
    ),
}
_LOGGERS = ("", "megatron", *_UNSAID)


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the process at the end of the block: environment, working folder, filters of warnings and logs, hooks, random
    states, and torch's settings. Also a decorator: `@preserve_process_state()`.
    """
    restore = [
        _saved(lambda: dict(os.environ), _set_environment),
        _saved(os.getcwd, _set_folder),
        _saved(lambda: list(warnings.filters), _set_filters),
        *(_saved(partial(_logger_state, logging.getLogger(name)), _set_logger) for name in _LOGGERS),
        _saved(lambda: (sys.excepthook, threading.excepthook, sys.unraisablehook), _set_hooks),
        _saved(random.getstate, random.setstate),
    ]
    if numpy := sys.modules.get("numpy"):
        restore.append(_saved(numpy.random.get_state, numpy.random.set_state))
    if "torch" in sys.modules:
        restore += _saved_of_torch()
    try:
        quiet()
        yield
    finally:
        for put_back in reversed(restore):
            put_back()


def quiet() -> None:
    """Suppress warnings about packages that zoo does not need, and about how megatron-core calls torch."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # Python names the file in the place of a module in warnings about code that it compiles.
    warnings.filterwarnings("ignore", module=r".*[/.]megatron/", category=SyntaxWarning)
    # FlashAttention 4's compiler's, of an argument that isn't given.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    # megatron-core calls functions of torch.distributed by names that torch 2.14 has new ones for.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for name in _UNSAID:
        logger = logging.getLogger(name)
        if _is_said not in logger.filters:
            logger.addFilter(_is_said)


def _is_said(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_UNSAID[record.name])


def _saved[T](read: Callable[[], T], put_back: Callable[[T], object]) -> Callable[[], object]:
    """What puts back the value that is read now."""
    return partial(put_back, read())


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_folder(folder: str) -> None:
    if os.getcwd() != folder:
        os.chdir(folder)


def _set_filters(filters: Sequence[object]) -> None:
    if list(warnings.filters) != filters:
        known: Any = warnings
        known.filters[:] = filters
        known._filters_mutated()


type _LoggerState = tuple[logging.Logger, int, list[Any], list[logging.Handler]]
type _Hooks = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def _logger_state(logger: logging.Logger) -> _LoggerState:
    return logger, logger.level, list(logger.filters), list(logger.handlers)


def _set_logger(state: _LoggerState) -> None:
    logger, level, filters, handlers = state
    logger.setLevel(level)
    logger.filters[:], logger.handlers[:] = filters, handlers


def _set_hooks(hooks: _Hooks) -> None:
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def _saved_of_torch() -> list[Callable[[], object]]:
    import torch

    from zoo.parallel.determinism import set_deterministic

    cudnn, core = torch.backends.cudnn, torch._C

    def set_cudnn(flags: tuple[bool, bool]) -> None:
        cudnn.deterministic, cudnn.benchmark = flags

    def deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    restore = [
        _saved(deterministic, lambda flags: set_deterministic(*flags)),
        _saved(core._get_deterministic_fill_uninitialized_memory, core._set_deterministic_fill_uninitialized_memory),
        _saved(lambda: (cudnn.deterministic, cudnn.benchmark), set_cudnn),
        _saved(torch.get_num_threads, torch.set_num_threads),
        _saved(sys.getswitchinterval, sys.setswitchinterval),
        _saved(torch.get_default_dtype, torch.set_default_dtype),
        _saved(torch.is_grad_enabled, torch.set_grad_enabled),
        _saved(torch.get_rng_state, torch.set_rng_state),
    ]
    if torch.cuda.is_initialized():
        restore.append(_saved(torch.cuda.current_device, torch.cuda.set_device))
        restore.append(_saved(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return restore
