"""What signals raise, also where a library makes another exception of it."""

import os
import signal

import pytest

from zoo.engine.interrupts import Preempted, interrupts


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)]
)
def test_an_interrupt_in_the_guise_of_an_error(number: signal.Signals, raised: type[BaseException]) -> None:
    with pytest.raises(raised), interrupts() as stop, stop.undisguised():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt as error:
            raise RuntimeError("the store has failed") from error


def test_an_error_of_its_own_stays() -> None:
    """Also where a signal was noted: the step that was to be ended has failed by itself."""
    with pytest.raises(RuntimeError), interrupts() as stop, stop.undisguised():
        raise RuntimeError("no")
    with pytest.raises(OSError, match="full"), interrupts() as stop, stop.undisguised(), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("full")
