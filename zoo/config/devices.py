"""Which GPUs and cores this machine shows and how large those are, without importing torch (about a second)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@cache
def gpu_count() -> int:
    """GPUs that torch could use here: its build has CUDA, the driver answers, CUDA_VISIBLE_DEVICES lets them."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not _torch_has_cuda():
        return 0
    return _driver_count()


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its `version.py`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


@cache
def gpu_memory() -> int:
    """Bytes of memory of the smallest of those GPUs; 0 where there is none."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(gpu_count())]
        return min(sizes, default=0)
    sizes = []
    for index in range(gpu_count()):
        (driver, device), size = _device(index), ctypes.c_size_t()
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return min(sizes, default=0)


@cache
def gpu_name() -> str:
    """The driver's name of the first of those GPUs, "NVIDIA H200"; "" where it says none."""
    name = ctypes.create_string_buffer(100)
    try:
        driver, device = _device(0)
        error = driver.cuDeviceGetName(name, len(name), device)
    except (OSError, AttributeError):
        return ""
    return "" if error else name.value.decode("ascii", "replace")


@cache
def gpu_capabilities() -> frozenset[tuple[int, int]]:
    """The compute capabilities of those GPUs, (9, 0) of an H200's: most often one; none where the driver says none.

    It is asked also where torch is there, which would take memory of a GPU to say them.
    """
    try:
        return frozenset(_driver_capability(index) for index in range(gpu_count()))
    except (OSError, AttributeError):
        return frozenset()


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(ranks: int) -> int:
    """What each of so many ranks has of them, one at least."""
    return max(1, cores() // max(ranks, 1))


def cpu_threads(wanted: int | None, ranks: int = 1) -> int:
    """Threads for the operations of one of `ranks` ranks on the CPU: `wanted`, else OMP_NUM_THREADS, else its cores.

    Beside a GPU it is one: the CPU has index tensors of some 10,000 entries to work on, and a step would wait for the
    slowest of many threads each time: up to 1.5 times as long with 64 threads on cores that other programs use.
    """
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    default = 1 if gpu_count() else share_of_cores(ranks)
    return wanted or int(variable if variable.isdecimal() else 0) or default


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver_count() -> int:
    """Devices the CUDA driver counts; 0 where there is no driver. It honours CUDA_VISIBLE_DEVICES."""
    try:
        driver, count = _driver(), ctypes.c_int()
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def _device(index: int) -> tuple[ctypes.CDLL, ctypes.c_int]:
    """The driver, and its handle of a GPU; OSError where it does not give one."""
    driver, device = _driver(), ctypes.c_int()
    if error := driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        raise OSError(f"the CUDA driver does not say what GPU {index} is: error {error}")
    return driver, device


def _driver_capability(index: int) -> tuple[int, int]:
    (driver, device), numbers = _device(index), []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        if error := driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            raise OSError(f"the CUDA driver does not say what GPU {index} is: error {error}")
        numbers.append(number.value)
    return numbers[0], numbers[1]
