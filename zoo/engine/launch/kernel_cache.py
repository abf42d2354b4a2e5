"""A cache that keeps compiled kernels between runs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os

from zoo.config.devices import gpu_capabilities
from zoo.files import cache_folder

_NAME = "FLASH_ATTENTION_CUTE_DSL_CACHE"  # environment of FlashAttention 4


def keep_kernels() -> None:
    """Make FlashAttention 4 keep the kernels that it compiles, in `$XDG_CACHE_HOME/zoo/flash_attention_4`.

    Else every process compiles them (12 of the 16 seconds that a first step of receipts-2b took on an H200). To be called
    before ranks are started and before megatron-core is imported: FlashAttention 4 reads its environment when it is
    imported, which Transformer Engine does. Not all names of its kernels contain the GPU's architecture, so each architecture has a
    folder of its own, and a machine with several has none. Nor is it asked to where the environment says already what to do, or where it
    would fail since files can't be written or locked.
    """
    if f"{_NAME}_ENABLED" in os.environ or not importlib.util.find_spec("flash_attn"):
        return
    if len(capabilities := gpu_capabilities()) != 1:
        return
    ((major, minor),) = capabilities
    cache = cache_folder("flash_attention_4")
    if cache is None:
        return
    with contextlib.suppress(OSError):
        folder = cache / f"sm{major}{minor}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.environ |= {f"{_NAME}_ENABLED": "1", f"{_NAME}_DIR": str(folder)}
