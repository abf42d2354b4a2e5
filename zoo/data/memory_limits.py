"""Limits of memory that the system enforces: for a decoding worker, and for the rank while it unpacks a parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def limit_memory(megabytes: int) -> None:
    """Let this process have no more than that beyond what it has, in MiB; further requests fail. Does nothing outside Linux."""
    import resource

    limit = _address_space(megabytes)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def memory_limited(megabytes: int) -> Iterator[None]:
    """`limit_memory` within the block."""
    import resource

    limit, (soft, hard) = _address_space(megabytes), resource.getrlimit(resource.RLIMIT_AS)
    if limit is None or (soft != resource.RLIM_INFINITY and soft <= limit):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space(megabytes: int) -> int | None:
    """Bytes of address space that this process has, and so many MiB more; None where that is not known."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return None
    return pages * resource.getpagesize() + megabytes * 2**20
