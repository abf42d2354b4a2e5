"""Caches that keep compiled kernels between runs."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

from zoo.config.devices import gpu_capabilities
from zoo.files import cache_folder

# Environment of a library, its package, and the folder of its cache.
_CACHES = (("FLASH_ATTENTION_CUTE_DSL_CACHE", "flash_attn", "flash_attention_4"), ("QUACK_CACHE", "quack", "quack"))


def keep_kernels() -> None:
    """Make FlashAttention 4 and QuACK keep the kernels that they compile, in `$XDG_CACHE_HOME/zoo`.

    Else every process compiles FlashAttention 4's kernels (12 of the 16 seconds that a first step of receipts-2b took on an H200), and QuACK keeps
    its own in the system's folder of temporary files. To be called before ranks are started and before megatron-core is imported: both read their environment when
    they are imported, which Transformer Engine does. Not all names of kernels contain the GPU's architecture, so each architecture has a
    folder of its own, and a machine with several has none. Neither is asked to where the environment says already what to do. Nothing is kept
    where it would fail since files can't be written or locked.
    """
    if len(capabilities := gpu_capabilities()) != 1:
        return
    ((major, minor),) = capabilities
    for name, package, kept in _CACHES:
        enabled, folder_variable = f"{name}_ENABLED", f"{name}_DIR"
        if {enabled, folder_variable} & os.environ.keys() or not importlib.util.find_spec(package):
            continue
        cache = cache_folder(kept)
        folder = cache and cache / f"sm{major}{minor}"
        usable = folder is not None and _can_be_locked(folder)
        os.environ |= {enabled: "1", folder_variable: str(folder)} if usable else {enabled: "0"}


def _can_be_locked(folder: Path) -> bool:
    """Whether files in a folder, which is made, can be written and locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
