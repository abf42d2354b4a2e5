"""Copies of a rank's pieces beside a GPU's next step, on a stand-in for its streams."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.storage.pieces import Piece
from zoo.errors import UserError
from zoo.nn.adamw.state import Moment

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Cuda:
    """In the place of torch.cuda's streams and events, on tensors of the host: what is done in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.streams = ["main"]
        cuda = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "copies") -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                cuda.said.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Any) -> None:
                cuda.said.append(f"{self.name} waits for the event of {event.name}")

            def __enter__(self) -> None:
                cuda.streams.append(self.name)

            def __exit__(self, *_: object) -> None:
                cuda.streams.pop()

        class Event:
            def record(self, stream: Stream) -> None:
                self.name = stream.name
                cuda.said.append(f"event of {stream.name}")

            def synchronize(self) -> None:
                cuda.said.append(f"the host waits for the event of {self.name}")

        main, pinned = Stream(name="main"), []
        self.pinned, self.error = pinned, 0
        runtime = SimpleNamespace(
            cudaHostRegister=lambda place, size, flags: pinned.append(size) or self.error,
            cudaHostUnregister=lambda place: pinned.clear() or 0,
        )
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        copy = Tensor.copy_

        def noted(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
            cuda.said.append(f"{cuda.streams[-1]} copies {other.numel()}, {non_blocking}")
            with torch._C.DisableTorchFunction():  # what a world on the CPU has installed would call this again
                return copy(self, other)

        monkeypatch.setattr(Tensor, "copy_", noted)


def test_on_a_gpu_weights_are_copied_beside_the_step_and_its_update_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward or backward pass may change is copied before it, in the step's own stream; short pieces before long ones."""
    cuda = Cuda(monkeypatch)
    weight, short, buffer = torch.randn(10), torch.randn(4), torch.randn(3)
    pieces = [
        Piece("w", (10,), (0,), (10,), weight, device=GPU),
        Piece("s", (4,), (0,), (4,), short, device=GPU),
        Piece("b", (3,), (0,), (3,), buffer, steady=False, device=GPU),
    ]
    copied = CpuCopy(GPU)
    copied.take(pieces, {})
    assert cuda.said == [
        "copies waits for main", "main copies 3, True", "event of main", "copies copies 4, True", "copies copies 10, True",
        "event of copies",
    ]  # fmt: skip
    assert cuda.pinned == [4096] and bytes(copied.view()[:40]) == weight.numpy().tobytes()
    assert bytes(copied.view()[64:80]) == short.numpy().tobytes(), "where it was before"
    cuda.said.clear()
    copied.before_update()
    copied.wait()
    assert cuda.said == [
        "main waits for the event of main", "main waits for the event of copies",
        "the host waits for the event of main", "the host waits for the event of copies",
    ]  # fmt: skip
    copied.release()
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that takes it beforehand says nothing; the copy does, and doesn't go on without."""
    cuda = Cuda(monkeypatch)
    cuda.error = 2
    piece = Piece("w", (10,), (0,), (10,), torch.randn(10), device=GPU)
    copied = CpuCopy(GPU)
    copied.prepare([piece], {})
    with pytest.raises(UserError, match=r"can't be pinned for saves \(CUDA error 2\); leave the host more room"):
        copied.take([piece], {})
    cuda.error = 0
    copied.take([piece], {})
    assert bytes(copied.view()[:40]) == piece.data.numpy().tobytes()


def test_state_on_the_host_is_copied_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU, threads take what an optimizer holds on the host; its update waits for them, and so does the writer."""
    asked, go = threading.Event(), threading.Event()
    moment = Moment.zeros(3 * 128, torch.uint8, signed=False, device=CPU)
    moment.write(torch.rand(3 * 128))

    def source(start: int, end: int) -> torch.Tensor:
        asked.set()
        assert go.wait(10)
        return moment.read(start, end).bfloat16()

    like = torch.empty(3 * 128, dtype=torch.bfloat16, device="meta")
    held = Piece("m", (384,), (0,), (384,), like, source=source, device=CPU)
    plain = Piece("w", (5,), (0,), (5,), torch.arange(5.0))
    Cuda(monkeypatch)
    copied = CpuCopy(GPU, threads=2)
    copied.take([held, plain], {})
    assert asked.wait(10) and not copied._from_cpu[0].done()  # `take` has come back before
    under_way = copied._from_cpu
    threading.Timer(0.2, go.set).start()
    copied.before_update()
    assert all(one.done() for one in under_way)
    copied.wait()
    found = torch.frombuffer(copied.view(), dtype=torch.bfloat16)[:384]
    torch.testing.assert_close(found, moment.read().bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(
        torch.frombuffer(copied.view(), dtype=torch.float32, offset=768)[:5], torch.arange(5.0), rtol=0, atol=0
    )
    assert held.on_cpu and plain.on_cpu and not Piece("g", (1,), (0,), (1,), like[:1]).on_cpu
