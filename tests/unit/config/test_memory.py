"""Bounds on the host's memory: the machine's, those of control groups of both kinds, the address space."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.config import memory
from zoo.config.memory import host_memory, kernel_kills, killed_for_memory, limits, ran_out

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB with 48 GiB left, in no control group."""
    write(tmp_path / "proc" / "meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
    write(tmp_path / "proc" / "self" / "statm", "1 1 1 1 0 1 0\n")
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_machine_alone(system: Path) -> None:
    (limit,) = limits()
    assert (limit.total, limit.left, limit.name) == (64 * GIB, 48 * GIB, "this machine's memory")
    assert host_memory(4) == 12 * GIB


def test_a_group_above_has_the_limit(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "0::/jobs/7/step\n")
    group = system / "cgroup" / "jobs"
    write(group / "7" / "step" / "memory.max", "max\n")
    write(group / "7" / "memory.max", f"{8 * GIB}\n")
    write(group / "7" / "memory.current", f"{5 * GIB}\n")
    write(group / "7" / "memory.stat", f"anon 1\ninactive_file {GIB}\n")
    tightest = limits()[0]
    assert (tightest.total, tightest.left) == (8 * GIB, 4 * GIB)
    assert "control group" in tightest.name and host_memory(2) == 2 * GIB


def test_a_group_of_the_older_kind(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "4:memory:/docker/abc\n1:cpu:/\n0::/\n")
    group = system / "cgroup" / "memory" / "docker" / "abc"
    write(group / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{GIB}\n")
    write(group.parent / "memory.limit_in_bytes", "9223372036854771712\n")  # no limit
    write(group.parent / "memory.usage_in_bytes", f"{GIB}\n")
    assert (limits()[0].total, limits()[0].left, len(limits())) == (2 * GIB, GIB, 2)


def test_the_address_space_is_each_process_s_own() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 ** 32, 2 ** 32))\n"
        "from zoo.config.memory import limits\n"
        "print(*[(limit.total, limit.left > 2 ** 31, limit.name) for limit in limits() if limit.own])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str((2**32, True, "the limit of a process's address space (ulimit -v)"))


def test_what_says_that_memory_is_used_up() -> None:
    torch = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    assert (
        ran_out(MemoryError())
        and ran_out(OSError(12, "Cannot allocate memory"))
        and ran_out(RuntimeError(torch))
        and ran_out(ImportError("libx.so: failed to map segment from shared object"))
    )
    assert not ran_out(RuntimeError("shape")) and not ran_out(OSError(28, "No space left on device"))


def test_kills_of_the_kernel_are_told_from_others(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "0::/job\n")
    write(system / "proc" / "vmstat", "pgfree 7\noom_kill 2\n")
    group = system / "cgroup" / "job"
    for name, text in (("max", f"{8 * GIB}\n"), ("current", "0\n"), ("events", "low 0\noom 0\noom_kill 0\n")):
        write(group / f"memory.{name}", text)
    before = kernel_kills()
    assert before == 2 and killed_for_memory(before) == " (not by the kernel for want of memory)"
    write(group / "memory.events", "low 0\noom 1\noom_kill 1\n")
    said = killed_for_memory(before)
    assert said.startswith(" of the kernel, for want of memory: the memory limit of its control group ")
    assert " is 8.6 GB; set data.cache_mb " in said
