"""What fuzzing tests share: how many cases, how long one may take, how much memory all may take, and bytes with faults.

ZOO_FUZZ_CASES says how many cases of each kind are tried; without it, a hundred. `make test-all` and continuous integration try 400.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from zoo.data.errors import RowError

CASES = int(os.environ.get("ZOO_FUZZ_CASES", "100"))
CASE_SECONDS = 10.0  # longest time that one case may take
NUMBERS = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 32767, 32768, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63]


def fuzzed(share: float = 1.0) -> settings:
    """Settings of a fuzzing test; `share` of the cases where one takes long. The same cases each time for a few, new ones for many."""
    return settings(
        max_examples=max(10, round(CASES * share)) if CASES < 10_000 else CASES,
        deadline=None,
        derandomize=CASES < 10_000,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


class Hang(BaseException):
    """A case took too long."""


@contextmanager
def within(seconds: float = CASE_SECONDS) -> Iterator[None]:
    """Raise Hang where the block takes longer, also where it is caught up in Python's own loops."""

    def late(*_: Any) -> None:
        raise Hang(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_below(megabytes: float) -> Iterator[None]:
    """That this process takes less than that in the block, in MiB beyond what it had at its beginning. Looks at Linux alone."""
    if not Path("/proc/self/clear_refs").exists():
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_mb()
    yield
    grown = peak_mb() - before
    assert grown < megabytes, f"{grown:.0f} MiB more than before, over {megabytes} MiB"


def peak_mb(process: int | str = "self") -> float:
    """The most memory that a process has had, in MiB."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024


def inside(path: str | Path, root: Path) -> bool:
    """Whether a path leads into a folder, links followed."""
    return Path(path).resolve().is_relative_to(root.resolve())


@st.composite
def mutated(draw: Any, wholes: list[bytes], edits: int = 6) -> bytes:
    """One of `wholes` with bytes changed, cut, repeated or taken from another: mostly in the first kilobyte, where headers are."""
    data = bytearray(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.integers(1, edits))):
        near = draw(st.booleans())
        at = draw(st.integers(0, max(0, min(len(data), 1024) - 1 if near else len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "number", "bytes", "cut", "drop", "repeat", "other"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            number, size = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([1, 2, 4, 8]))
            order = draw(st.sampled_from(["little", "big"]))
            data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, order)
        elif kind == "bytes":
            some = draw(st.binary(min_size=1, max_size=16))
            data[at : at + len(some)] = some
        elif kind == "cut":
            del data[at + 1 :]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "repeat":
            piece = data[at : at + draw(st.integers(1, 256))]
            data[at:at] = piece * draw(st.integers(1, 8))
        else:
            other = draw(st.sampled_from(wholes))
            size = draw(st.integers(1, 256))
            data[at : at + size] = other[at : at + size]
    return bytes(data)


def read_as_rows(rows: Sequence[Any], count: int) -> Iterator[Any]:
    """The first `count` places of a table that are rows; the others must be bad rows, in one printable line."""
    for place in range(min(len(rows), count)):
        try:
            yield rows[place]
        except RowError as error:
            assert str(error).isprintable() and len(str(error)) < 1200
