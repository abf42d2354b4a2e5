"""What signals raise, also where a library makes another exception of it."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.parallel.signals import Preempted, interrupts

pytestmark = pytest.mark.usefixtures("signals_arrive")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupt_in_the_guise_of_an_error(number: signal.Signals) -> None:
    with (
        pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Preempted),
        interrupts() as stop,
        stop.re_raise_signal(),
    ):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt as error:
            raise RuntimeError("the store has failed") from error


def test_an_error_of_its_own_stays() -> None:
    """Also where a signal was noted: the step that was to be ended has failed by itself."""
    with pytest.raises(RuntimeError), interrupts() as stop, stop.re_raise_signal():
        raise RuntimeError("no")
    with pytest.raises(OSError, match="full"), interrupts() as stop, stop.re_raise_signal(), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("full")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_closed_terminal_is_noted_once_and_the_second_signal_ends(number: signal.Signals) -> None:
    program = f"""
import os, time
from zoo.parallel import signals
signals.SAME_SECONDS = 0.2
with signals.interrupts() as stop, stop.deferred():
    os.kill(os.getpid(), {int(number)})
    os.kill(os.getpid(), {int(number)})  # the same request
    assert stop.asked and stop.preempted
    time.sleep(0.3)
    os.kill(os.getpid(), {int(number)})
print("never")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, ""), done


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_said_to_a_terminal_that_is_gone_is_dropped(tmp_path: Path) -> None:
    """The terminal's other end is closed, as by a lost connection: the run gets a SIGHUP and every write fails."""
    program = f"""
import os, time
from zoo.parallel.signals import interrupts
from zoo.logging.progress_line import StepLine
with interrupts() as stop, stop.deferred():
    progress = StepLine(3, 0, 1)
    print("ready", flush=True)
    while not stop.asked:
        time.sleep(0.01)
    progress.say("saved")
    open({str(tmp_path / "saved")!r}, "w").close()
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    while b"ready" not in os.read(terminal, 100):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "saved").exists()
