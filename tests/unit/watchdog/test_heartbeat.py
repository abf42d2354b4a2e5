"""A rank whose store is gone says that rank 0 died, unless the run's end is reported; a lost disk is reported once."""

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zoo.logging.run_log import append_event
from zoo.parallel.processes import machine
from zoo.watchdog.diagnosis import Diagnosis, Heartbeat, PeerState
from zoo.watchdog.heartbeat import HeartbeatMonitor
from zoo.watchdog.progress import Progress


class Left(Exception):
    """In place of the end of the process."""


@pytest.fixture
def orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 1 of two on this machine; rank 0's process is no more."""
    recipe: Any = SimpleNamespace(run=SimpleNamespace(dir=tmp_path, stage=None, save_within=60.0, hang_timeout=10.0))
    world: Any = SimpleNamespace(rank=1, size=2)
    watch: Any = HeartbeatMonitor(recipe, world, SimpleNamespace(asked=False))
    gone = Heartbeat(0, 7, Progress().moment(), machine(), 2**22 + 1, "1")
    watch._store = object()
    watch._peers[0] = PeerState(gone)

    def leave(diagnosis: Diagnosis, reported: bool = False) -> None:
        raise Left(diagnosis)

    monkeypatch.setattr(watch, "_leave", leave)
    (tmp_path / "train.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    return watch


def test_rank_0_died_or_left_on_a_diagnosis_that_was_not_read_in_time(orphan: Any, tmp_path: Path) -> None:
    with pytest.raises(Left) as left:
        orphan._without_store()
    diagnosis = left.value.args[0]
    assert diagnosis.reason == "died" and diagnosis.message.startswith("rank 0 died, last seen after step 0")
    append_event(tmp_path, "end", 3, reason="hangs", ranks=[1], message="rank 1 got no further")
    with pytest.raises(Left) as left:
        orphan._without_store()
    assert left.value.args[0].message == ""


def test_a_lost_disk_that_names_no_file_is_for_the_user_to_fix(orphan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `os.fsync` raises it: the launcher shows the sentence that the error becomes, and no diagnosis beside it."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(orphan, "_publish", lambda state, error: said.append((state, error)))
    monkeypatch.setattr(orphan, "_read", lambda *_: None)
    monkeypatch.setattr(orphan, "_post", lambda diagnosis: said.append(("diagnosis", diagnosis.message)) or diagnosis)
    orphan._end_badly(OSError(errno.EIO, "Input/output error"))
    (state, error), diagnosis = said
    assert state == "failed" and "the disk or its server is lost" in error
    assert diagnosis == ("diagnosis", "")


def test_a_pause_of_the_whole_process_counts_against_nobody(orphan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by SIGSTOP and SIGCONT: the thread wakes much too late, and so did all others."""
    clock = [100.0]
    monkeypatch.setattr("zoo.watchdog.heartbeat.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(orphan._closing, "wait", lambda seconds: clock.__setitem__(0, clock[0] + waits.pop(0)) or False)
    waits = [0.6, 0.6, 3600.0]
    for peer in orphan._peers.values():
        peer.heard = peer.moved = 100.0
    for gap in (0.6, 1.2, 1.7):  # the pause itself is left out
        assert orphan._wait_for_round() is False
        assert all(clock[0] - peer.moved == pytest.approx(gap) for peer in orphan._peers.values())
        assert all(clock[0] - peer.heard == pytest.approx(gap) for peer in orphan._peers.values())


def test_a_signal_that_leaves_no_time_for_the_copy_says_where_the_checkpoint_is(
    orphan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan._stop = SimpleNamespace(asked=True, preempted=True, since=0.0)
    monkeypatch.setattr(orphan, "_post", lambda diagnosis: diagnosis)
    for staged, said in ((None, "the run has not saved; there is no checkpoint"), ((2, Path("stage")), "has not saved"),
                         ((3, Path("stage/iter_3")), "the checkpoint of step 3 is not copied to")):  # fmt: skip
        orphan.progress.step, orphan.progress.staged = 3, staged
        with pytest.raises(Left) as left:
            orphan._round()
        assert said in left.value.args[0].message and left.value.args[0].code == 75
    assert "it is whole in stage/iter_3, and the same command on this machine" in left.value.args[0].message


@pytest.mark.parametrize(
    ("rank", "size", "watched"),
    [(3, 64, range(64)), (0, 4096, range(4096)), (4093, 4096, [0, 1, *range(4088, 4096)]), (1, 128, range(8))],
)
def test_whose_heartbeats_a_rank_reads(
    rank: int, size: int, watched: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in a small run; in a large one the first rank reads all and judges whether the run hangs, others look at those near them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(
        "zoo.watchdog.heartbeat._PAUSE_SECONDS", 60.0
    )  # a full machine's are the test's, not the ranks'
    recipe: Any = SimpleNamespace(run=SimpleNamespace(dir=tmp_path, stage=None, save_within=60.0, hang_timeout=1e-6))
    world: Any = SimpleNamespace(rank=rank, size=size)
    watch: Any = HeartbeatMonitor(recipe, world, SimpleNamespace(asked=False))
    beats = {f"heartbeat{other}": json.dumps(replace(watch._heartbeat, rank=other).to_json()) for other in range(size)}
    asked: list[str] = []

    def multi_get(keys: list[str]) -> list[str]:
        asked.extend(keys)
        return [beats.get(key, "") for key in keys]

    watch._store = SimpleNamespace(multi_get=multi_get, set=lambda *_: None)
    losses: list[Any] = []
    monkeypatch.setattr(watch, "_report_loss", lambda *loss: losses.append(loss))
    watch._silence = 0
    watch._round()
    assert asked == [*(f"heartbeat{other}" for other in watched if other != rank), "diagnosis"]
    watch._round()
    assert bool(losses) == (rank == 0 or size <= 64)
