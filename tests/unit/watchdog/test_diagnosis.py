"""Which rank is the cause when a run can't go on, and the message."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from zoo.parallel.processes import birth
from zoo.watchdog.diagnosis import Heartbeat, PeerState, describe, diagnose
from zoo.watchdog.progress import Moment, where


def seen(
    rank: int, moves: int = 7, waits_in: str = "all_reduce", *, moved: float = 0.0, heard: float = 0.0, **more
) -> PeerState:
    """A rank that moved, and was heard, so many seconds ago."""
    at = Moment(3, "data", moves, moves, 1.0, "zoo/training/trainer.py:1", waits_in)
    now = time.monotonic()
    return PeerState(Heartbeat(rank, 1, at, "here", 1, "0", **more), now - heard, now - moved)


def found(*ranks: PeerState, alive: dict[int, bool] | None = None, silence: float = 60.0, stuck: float = 100.0):
    return diagnose({one.heartbeat.rank: one for one in ranks}, silence=silence, stuck=stuck, alive=alive or {})


def test_a_run_in_which_one_rank_moves_is_left_alone() -> None:
    assert found(seen(0, moved=1000.0), seen(1, moved=99.0), seen(2, moved=1000.0)) is None
    assert found(seen(0, moved=1000.0), seen(1, moved=1000.0), stuck=0.0) is None
    assert found(seen(0, heard=1000.0), silence=0.0) is None


def test_who_hangs_is_behind_and_waits_for_nobody() -> None:
    stuck = {"moved": 101.0}
    assert found(seen(0, **stuck), seen(1, 7, "", **stuck), seen(2, **stuck)) == ("hangs", [1])
    assert found(seen(0, 8, **stuck), seen(1, 7, **stuck), seen(2, 8, **stuck)) == ("hangs", [1])
    assert found(seen(0, **stuck), seen(1, **stuck)) == ("hangs", [0, 1])  # the exchange itself


def test_a_cause_goes_before_its_effects() -> None:
    ranks = [seen(0, heard=61.0), seen(1, state="failed", error="E: e"), seen(2)]
    assert found(*ranks, alive={2: False}) == ("failed", [1])
    assert found(ranks[0], ranks[2], alive={2: False}) == ("died", [2])
    assert found(ranks[0], ranks[2]) == ("silent", [0])
    assert found(seen(0), seen(1, state="left", heard=1000.0), alive={1: False}) is None


def test_the_message() -> None:
    ranks = {rank: seen(rank) for rank in range(6)}
    ranks[2] = seen(2, 7, "", state="failed", error="ValueError: no")
    message = describe("failed", [2], ranks, limit=0.0, checkpoint=Path("run/checkpoints/iter_2"))
    assert message == (
        "rank 2 failed after step 3, in data at zoo/training/trainer.py:1: ValueError: no; ranks 0-1, 3-5 were waiting in "
        "all_reduce at zoo/training/trainer.py:1 (data after step 3); the same command resumes from run/checkpoints/iter_2"
    )
    alone = describe("hangs", [0], {0: seen(0, 7, "")}, limit=60.0, checkpoint=None)
    assert alone == (
        "rank 0 got no further for 60 s (run.hang_timeout) after step 3, in data at zoo/training/trainer.py:1; "
        "there is no checkpoint to resume from"
    )


def test_beats_travel() -> None:
    heartbeat = seen(4, state="failed", error="x").heartbeat
    assert Heartbeat.from_json(heartbeat.to_json()) == heartbeat
    here = PeerState(heartbeat, heard=0.0, moved=0.0)
    here.update(replace(heartbeat, count=2))
    assert here.heard > 0 and here.moved == 0


def test_a_process_that_is_there_and_one_that_is_not() -> None:
    assert birth(os.getpid()) == birth(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert birth(child.pid) is None  # a zombie
    child.wait()
    assert birth(child.pid) is None


def test_where_a_thread_stands() -> None:
    import zoo

    home = str(Path(zoo.__file__).parent)
    ours = [(f"{home}/training/trainer.py", 5, "run"), (f"{home}/parallel/megatron/cpu_host.py", 9, "gather")]
    torch = "/x/torch/distributed"
    theirs = [(f"{torch}/c10d_logger.py", 1, "wrapper"), (f"{torch}/distributed_c10d.py", 2, "barrier")]
    assert where([*ours, *theirs]) == ("zoo/training/trainer.py:5", "barrier")
    assert where([*theirs, *ours]) == ("zoo/training/trainer.py:5", "")
