"""How many GPUs this machine shows, without importing torch (about a second)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path


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


def _driver_count() -> int:
    """Devices the CUDA driver counts; 0 where there is no driver. It honours CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value
