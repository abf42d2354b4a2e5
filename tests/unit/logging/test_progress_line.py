"""The live line on a terminal of any width: nothing wraps, and step, loss and ETA are always there."""

import fcntl
import os
import pty
import re
import struct
import termios
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from zoo.logging import progress_line
from zoo.logging.progress_line import StepLine

METRICS = {"step": 12_345, "loss": 2.34567, "lr": 1e-5, "real_tokens": 812_345, "step_ms": 900.0, "pad_fraction": 0.031,
           "data_wait": 0.12}  # fmt: skip


@pytest.fixture(autouse=True)
def three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by 3 seconds each time that it is read."""
    now = count(0.0, 3.0)
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: next(now))


def shown(width: int, metrics: dict[str, Any], total: int, encoding: str = "utf-8", erases: bool = True) -> str:
    """What a terminal of that many columns gets of one step."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with os.fdopen(slave, "w", encoding=encoding) as stream:
        progress = StepLine(total, metrics["step"] - 1, 10, stream)
        assert progress.live == erases
        progress.step(metrics)
        text = os.read(master, 10_000).decode()
    os.close(master)
    assert text.startswith("\r\x1b[2K") == erases
    return text.removeprefix("\r\x1b[2K")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_line_fits_and_ends_with_the_time_to_go(width: int) -> None:
    line = shown(width, METRICS, 99_999)
    assert len(line) < width
    assert re.match(r"step 12345/99999  (\|[^|]{8,28}\|  )?loss 2.3457  ", line)
    assert re.search(r"  ETA 73:(02:4[2-9]|02:5\d|03:\d\d)$", line)  # 87,654 times what the clock says of 3 s
    assert "902,606 tok/s" in line
    assert ("|" in line) == (width >= 80)
    assert ("data 12%" in line) == (width >= 120) == ("pad 3.1%" in line)
    assert len(shown(20, METRICS, 99_999)) == 19, "a very narrow terminal does not wrap either"


def test_the_bar_shows_the_share_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for step, share in ((0, 0.0), (50, 0.5), (100, 1.0)):
        bar = shown(120, {**METRICS, "step": step}, 100).split("|")[1]
        assert abs(bar.count("█") / len(bar) - share) < 1 / len(bar)
    plain = shown(120, {**METRICS, "step": 50}, 100, encoding="ascii")
    assert plain.isascii() and re.search(r"\|#+5? +\|", plain)


def test_a_file_gets_all_of_it_and_so_does_a_dumb_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with (tmp_path / "log").open("w") as stream:
        StepLine(99_999, METRICS["step"] - 1, 10, stream).step(METRICS)
    for line in (shown(60, METRICS, 99_999, erases=False), (tmp_path / "log").read_text()):
        assert line.startswith("step 12345/99999  loss") and "real tokens/s  pad 3.1%  data 12%  ETA " in line
