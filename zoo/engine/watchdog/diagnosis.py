"""Who is to blame when a run can't go on, and the one message that says so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zoo.engine.distributed.signals import LOST
from zoo.engine.watchdog.progress import Moment


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself, over and over."""

    rank: int
    count: int  # of its beats
    moment: Moment
    host: str  # of the namespace that its process id belongs to
    pid: int
    born: str  # start time of the process, as the kernel tells it
    state: str = "alive"  # alive | left (came to its end) | failed
    error: str = ""  # why it failed

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Beat:
        """The other way round."""
        return cls(**{**values, "moment": Moment(**values["moment"])})


@dataclass
class Seen:
    """A rank as another one sees it, by the clock of that one."""

    beat: Beat
    beaten: float = field(default_factory=time.monotonic)  # when its count last changed
    moved: float = field(default_factory=time.monotonic)  # when its progress last changed

    def update(self, beat: Beat) -> None:
        """Take in what has been read of it."""
        now = time.monotonic()
        if beat.count != self.beat.count:
            self.beaten = now
        if beat.moment.progress != self.beat.moment.progress or beat.moment.phase != self.beat.moment.phase:
            self.moved = now
        self.beat = beat


@dataclass(frozen=True)
class Verdict:
    """Why all ranks are to leave, and with what exit code."""

    message: str  # one line; "" where nothing is to be said
    reason: str  # died | silent | failed | hangs | stopped
    code: int = LOST
    ranks: tuple[int, ...] = ()  # those to blame


def judge(
    seen: Mapping[int, Seen], *, silence: float, stuck: float, alive: Mapping[int, bool]
) -> tuple[str, list[int]] | None:
    """The reason for leaving and the ranks to blame, or None.

    Args:
        seen: every rank.
        silence: seconds without a beat after which a rank is given up; 0: never.
        stuck: seconds without progress of any rank after which the run is given up; 0: never.
        alive: by rank, for those of this machine: whether the process is there.
    """
    now = time.monotonic()
    here = {rank: one for rank, one in seen.items() if one.beat.state != "left"}
    failed = [rank for rank, one in here.items() if one.beat.state == "failed"]
    if failed:
        return "failed", failed
    died = [rank for rank in here if not alive.get(rank, True)]
    if died:
        return "died", died
    silent = [rank for rank, one in here.items() if silence and now - one.beaten > silence]
    if silent:
        return "silent", silent
    if stuck and here and all(now - one.moved > stuck for one in here.values()):
        return "hangs", _behind([one.beat for one in here.values()])
    return None


def _behind(beats: Sequence[Beat]) -> list[int]:
    """The ranks that the others wait for: those behind, and of them those that do not wait in an exchange themselves."""
    least = min((beat.moment.moves, bool(beat.moment.waits_in)) for beat in beats)
    return [beat.rank for beat in beats if (beat.moment.moves, bool(beat.moment.waits_in)) == least]


def describe(
    reason: str, blamed: Sequence[int], seen: Mapping[int, Seen], *, limit: float, checkpoint: Path | None
) -> str:
    """One line: who, its last step and phase, what each of the others was waiting for, and how to go on.

    `limit`: the seconds of silence or without progress that `reason` speaks of.
    """
    beats = {rank: one.beat for rank, one in seen.items()}
    others = [beat for rank, beat in beats.items() if rank not in blamed and beat.state == "alive"]
    what = {
        "died": "died, last seen",
        "silent": f"gave no sign of life for {limit:.0f} s, last seen",
        "failed": "failed",
        "hangs": f"got no further for {limit:.0f} s (run.hang_timeout)",
    }[reason]
    stands = "; ".join(
        f"{_ranks(group)} {what} {_stand(at)}" for at, group in _grouped([beats[r] for r in blamed])
    )
    errors = "".join(f": {beats[rank].error}" for rank in blamed if beats[rank].error)
    waiting = "; ".join(
        f"{_ranks(group)} {'were' if len(group) > 1 else 'was'} {_wait(at)}" for at, group in _grouped(others)
    )
    after = (
        f"the same command goes on from {checkpoint}"
        if checkpoint
        else "there is no checkpoint to go on from"
    )
    return "; ".join(part for part in (stands + errors, waiting, after) if part)


def _stand(moment: Moment) -> str:
    place = f" at {moment.place}" if moment.place else ""
    call = f" in {moment.waits_in}" if moment.waits_in else ""
    return f"after step {moment.step}, in {moment.phase}{call}{place}"


def _wait(moment: Moment) -> str:
    call = f"waiting in {moment.waits_in}" if moment.waits_in else "busy"
    place = f" at {moment.place}" if moment.place else ""
    return f"{call}{place} ({moment.phase} after step {moment.step})"


def _grouped(beats: Sequence[Beat]) -> list[tuple[Moment, list[int]]]:
    """Ranks that stand at the same place, in order of their first."""
    groups: dict[tuple[Any, ...], tuple[Moment, list[int]]] = {}
    for beat in beats:
        at = beat.moment
        groups.setdefault((at.step, at.phase, at.place, at.waits_in), (at, []))[1].append(beat.rank)
    return list(groups.values())


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
