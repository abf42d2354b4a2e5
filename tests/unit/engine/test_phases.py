import gc
import threading
import weakref

from zoo.engine.phases import Phases


class Activations:
    """What a function holds."""


def test_a_look_at_other_threads_keeps_nothing_of_theirs_alive() -> None:
    phases, places = Phases(), []

    def forward() -> weakref.ref[Activations]:
        held = Activations()
        watching = threading.Thread(target=lambda: places.append(phases.moment()))
        watching.start()
        watching.join()
        return weakref.ref(held)

    gc.disable()
    try:
        held = forward()
        assert len(places) == 1
        assert held() is None, "a frame of the training thread outlives its function"
    finally:
        gc.enable()
