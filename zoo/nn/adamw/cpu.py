"""AdamW's update on the host in one pass over memory: cpu.c, which is compiled on the machine at first need.

PyTorch's operations go over memory some 15 times (70 with 8-bit moments), and each takes Python's lock for longer than many
cores need for it. A C compiler is there wherever Triton's kernels run, as Triton needs one too. Where none is, or where
what it made differs from `zoo.nn.adamw.state.update`, that one makes the update, and `fallback_reason` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Unpack

import torch

from zoo.files import cache_folder
from zoo.nn.adamw import state
from zoo.nn.adamw.state import FIRST, SECOND, WORD, Moment, Part, UpdateOptions

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
COMPILE_SECONDS = 120.0


def update(part: Part, **options: Unpack[UpdateOptions]) -> None:
    """`zoo.nn.adamw.state.update` of a part on the host, in place, with the same options; threads may call it at once."""
    function = _loaded()[0]
    if function is None:
        state.update(part, **options)
    else:
        _call(function, part, options)


def fallback_reason() -> str | None:
    """Why PyTorch's operations make the update; None where the compiled function does."""
    return _loaded()[1]


def _call(function: Callable[..., int], part: Part, options: UpdateOptions) -> None:
    step, lr, (beta_1, beta_2) = options["step"], options["lr"], options["betas"]
    first, second = part.exp_avg, part.exp_avg_sq
    held = (part.weight, part.remainder, part.grad, first.values, first.exponents, second.values, second.exponents)
    assert all(x is None or (x.is_contiguous() and x.device.type == "cpu") for x in held)
    rates = (
        options.get("clip", 1.0),
        1.0 - lr * options["weight_decay"],
        1.0 - beta_1,
        beta_2,
        1.0 - beta_2,
        (1.0 - beta_2**step) ** 0.5,
    )
    refused = function(
        *(None if x is None else x.data_ptr() for x in held),
        part.weight.numel(),
        part.seed & WORD,
        *((step * 0xC2B2AE35 + which) & WORD for which in (FIRST, SECOND)),
        *(*rates, options["eps"], -lr / (1.0 - beta_1**step)),
        *(TYPES[x.dtype] for x in (part.grad, first.values, second.values)),
    )
    assert not refused, "a form of state that cpu.c has no case for"


@cache
def _loaded() -> tuple[Callable[..., int] | None, str | None]:
    """The compiled function, or why there is none."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        return None, "no C compiler (cc, gcc) was found"
    try:
        function = ctypes.CDLL(str(_compiled(compiler))).zoo_adamw
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        return None, f"{compiler} could not compile {SOURCE.name}: {message.strip().splitlines()[-1][:200]}"
    integers = [ctypes.c_int64, *[ctypes.c_uint32] * 3]
    function.argtypes = [*[ctypes.c_void_p] * 7, *integers, *[ctypes.c_float] * 8, *[ctypes.c_int] * 3]
    function.restype = ctypes.c_int
    if not _right(function):
        return None, f"what {compiler} made of {SOURCE.name} differs from PyTorch's operations"
    return function, None


def _compiled(compiler: str) -> Path:
    """The library, kept under a name that tells this source and this kind of processor."""
    folder = cache_folder("host") or Path(tempfile.mkdtemp(prefix="zoo-host-"))
    folder.mkdir(parents=True, exist_ok=True)
    known = "\n".join((SOURCE.read_text(), *FLAGS, compiler, _processor()))
    library = folder / f"adamw-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_name(f"{library.name}.{platform.node()}.{os.getpid()}")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(partial), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        partial.replace(library)  # ranks may all compile it; the last one stays
    return library


def _processor() -> str:
    """What tells processors apart that take different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    described = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return platform.machine() + "\n".join(dict.fromkeys(described))


def _right(function: Callable[..., int]) -> bool:
    """Whether it makes two updates of each form as PyTorch's operations do: weights to a rounding, moments to a unit of their form."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        for half in (False, True):
            compiled, plain = (_example(dtype, half, generator.manual_seed(1)) for _ in range(2))
            for step in (1, 2):
                options = UpdateOptions(step=step, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, clip=0.5)
                _call(function, compiled, options)
                state.update(plain, **options)
            pairs = [(compiled.weight, plain.weight)]
            pairs += [(getattr(compiled, name).read(), getattr(plain, name).read()) for name in state.MOMENTS]
            loose = 1e-6 if dtype == torch.float32 else 0.02  # rarely, a last bit decides what random bits add
            for result, expected in pairs:
                if not (result.float() - expected.float()).norm() <= loose * expected.float().norm():
                    return False
    return True


def _example(dtype: torch.dtype, half: bool, generator: torch.Generator) -> Part:
    numel = 300  # not a multiple of a block
    weight, remainder = torch.randn(numel, generator=generator), None
    if half:
        weight, remainder = state.split(weight)
    grad = torch.randn(numel, generator=generator).to(torch.bfloat16 if half else torch.float32)
    first, second = (Moment.zeros(numel, dtype, signed, torch.device("cpu")) for signed in (True, False))
    return Part(weight, remainder, grad, first, second, seed=7)
