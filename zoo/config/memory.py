"""How much memory of the host a process may have, and which bound says so."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import size

_OUT_OF_MEMORY = re.compile(
    r"[Cc]an(?:'|no)t allocate memory|std::bad_alloc|can't start new thread|failed to map segment from shared object"
)
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """A bound on memory, in bytes."""

    total: int
    left: int  # what may still be taken
    name: str  # for messages
    own: bool = False  # of each process by itself; else all on this machine (or in the container) share it


def limits() -> list[Limit]:
    """All bounds there are, the tightest first; none where the system reports none."""
    text = _read(PROC / "meminfo")
    sizes = {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    bounds = [*_cgroup(), *_address_space()]
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        bounds.append(Limit(sizes["MemTotal"], sizes["MemAvailable"], "this machine's memory"))
    return sorted(bounds, key=lambda limit: limit.left)


def host_memory(ranks: int = 1, process: int = 0) -> int:
    """Bytes that each of so many processes may still take; 0 where the system does not say.

    `process`: address space that a process takes for other things than its data.
    """
    return min((limit.left - process if limit.own else limit.left // ranks for limit in limits()), default=0)


def kernel_kills() -> int:
    """How many processes of this machine (or container) the kernel has ended for want of memory, since it started."""
    texts = [_read(PROC / "vmstat"), *(_read(group / "memory.events") for group, _ in _groups())]
    return sum(int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)", text, re.MULTILINE))


def killed_for_memory(before: int) -> str:
    """Why a process was ended by SIGKILL, as the end of a sentence; `before`: `kernel_kills` when it was started."""
    if kernel_kills() == before:
        return " (not by the kernel for want of memory)"
    bounds = [limit for limit in limits() if not limit.own]
    bound = f": {bounds[0].name} is {size(bounds[0].total)}" if bounds else ""
    return (
        f" of the kernel, for want of memory{bound}; set data.cache_mb or data.workers lower, packing.budget lower, or "
        f"engine.recompute=full"
    )


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the host's memory is used up: Python's, a library's or the system's."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if not isinstance(error, Exception) or isinstance(error, ValueError):  # the latter is about what was given
        return False
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _cgroup() -> Iterator[Limit]:
    """The limits of the groups that the process is in, as a container or a job sets them."""
    for group, names in _groups():
        most, used = (_read(group / name).strip() for name in names)
        if most.isdecimal() and used.isdecimal() and int(most) < 1 << 60:
            cache = re.search(
                r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE
            )  # given back if needed
            left = max(int(most) - int(used) + (int(cache[1]) if cache else 0), 0)
            yield Limit(int(most), left, "the memory limit of its control group (of a container or a job)")


def _groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of the groups that may bound memory, innermost first, with the names of the bound and of what is used."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        older = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield group, older if controllers else ("memory.max", "memory.current")
            if group == root:
                break


def _address_space() -> Iterator[Limit]:
    try:
        import resource
    except ImportError:  # not on Unix
        return
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(PROC / "self" / "statm").split()
    if most != resource.RLIM_INFINITY and pages:
        used = int(pages[0]) * resource.getpagesize()
        yield Limit(most, max(most - used, 0), "the limit of a process's address space (ulimit -v)", own=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
