"""What the CUDA driver says of GPUs, where torch isn't imported."""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from zoo.config import devices

ARCHITECTURES = [(9, 0), (10, 3)]  # of two GPUs


class Driver:
    """libcuda.so.1 with those GPUs, of 1,000 and 2,000 bytes."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(ARCHITECTURES)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = 1000 * (device.value - 39)
        return 0

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: ctypes.c_int) -> int:
        found._obj.value = ARCHITECTURES[device.value - 40][{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cached = (devices.gpu_count, devices.gpu_memory, devices.gpu_capabilities)
    monkeypatch.setattr(devices, "_driver", Driver)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_gpus_without_torch(driver: None) -> None:
    assert devices.gpu_count() == 2
    assert devices.gpu_memory() == 1000
    assert devices.gpu_capabilities() == set(ARCHITECTURES)
    assert "torch" not in sys.modules


def test_none_without_a_driver(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(devices, "_driver", missing)
    assert (devices.gpu_count(), devices.gpu_memory(), devices.gpu_capabilities()) == (0, 0, frozenset())


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_no_capability_is_made_up(driver: None, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which torch has counted the GPUs by other means, or has a build for other GPUs."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    monkeypatch.setattr(Driver, failing, lambda *_: 3)
    assert devices.gpu_capabilities() == frozenset()
    monkeypatch.setattr(devices, "_driver", lambda: ctypes.CDLL("libcuda-that-is-not-here.so"))
    devices.gpu_capabilities.cache_clear()
    assert devices.gpu_capabilities() == frozenset()


@pytest.mark.parametrize(
    ("gpus", "wanted", "said", "threads"),
    [
        (0, None, None, 4),  # of 16 cores a quarter
        (0, None, "2", 2),
        (0, None, "3,1", 3),  # of an outer and an inner level
        (0, None, "many", 4),
        (0, 5, "2", 5),
        (4, None, None, 1),
        (4, None, "8", 8),
        (4, 5, "8", 5),
    ],
)
def test_cpu_threads_of_a_rank(
    gpus: int, wanted: int | None, said: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
    monkeypatch.setattr(devices, "cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert devices.cpu_threads(wanted, ranks=4) == threads
