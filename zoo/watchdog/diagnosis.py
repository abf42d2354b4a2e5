"""Which rank is the cause when a run can't go on, and the one message that reports it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zoo.parallel.signals import LOST
from zoo.types import JsonMapping, JsonObject
from zoo.watchdog.progress import Moment


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank, as it publishes it again and again."""

    rank: int
    count: int  # heartbeats of this rank so far
    moment: Moment
    host: str  # of the namespace that its process id belongs to
    pid: int
    born: str  # start time of the process, in the kernel's units
    state: str = "alive"  # alive | left (came to its end) | failed
    error: str = ""  # why it failed

    def to_json(self) -> JsonObject:
        """The heartbeat as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: JsonMapping) -> Heartbeat:
        """The heartbeat that :meth:`to_json` was called on."""
        return cls(**{**values, "moment": Moment(**values["moment"])})


@dataclass
class PeerState:
    """A rank as another one sees it, with times on that one's monotonic clock."""

    heartbeat: Heartbeat
    heard: float = field(default_factory=time.monotonic)  # when its count last changed
    moved: float = field(default_factory=time.monotonic)  # when its progress last changed

    def update(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat that was read."""
        now, moment, before = time.monotonic(), heartbeat.moment, self.heartbeat.moment
        if heartbeat.count != self.heartbeat.count:
            self.heard = now
        if (moment.progress, moment.phase) != (before.progress, before.phase):
            self.moved = now
        self.heartbeat = heartbeat


@dataclass(frozen=True)
class Diagnosis:
    """Why all ranks are to leave, and with what exit code."""

    message: str  # one line; "" where nothing is to be reported
    reason: str  # died | silent | failed | hangs | stopped
    code: int = LOST
    ranks: tuple[int, ...] = ()  # the ranks that are the cause


def diagnose(
    peers: Mapping[int, PeerState], *, silence: float, stuck: float, alive: Mapping[int, bool]
) -> tuple[str, list[int]] | None:
    """The reason for leaving and the ranks that are the cause; None while the run may go on.

    Args:
        peers: the ranks that this one watches, itself among them: all; above 64 ranks, but on rank 0, ranks 0 and 1 and its node's.
        silence: seconds without a heartbeat after which a rank counts as lost; 0: never.
        stuck: seconds without progress of any rank after which the run counts as hanging; 0: never.
        alive: by rank, for those of this machine: whether the process exists.
    """
    now = time.monotonic()
    present = {rank: peer for rank, peer in peers.items() if peer.heartbeat.state != "left"}
    failed = [rank for rank, peer in present.items() if peer.heartbeat.state == "failed"]
    if failed:
        return "failed", failed
    died = [rank for rank in present if not alive.get(rank, True)]
    if died:
        return "died", died
    silent = [rank for rank, peer in present.items() if silence and now - peer.heard > silence]
    if silent:
        return "silent", silent
    if stuck and present and all(now - peer.moved > stuck for peer in present.values()):
        # The ranks that the others wait for: those that are behind and do not wait in an exchange themselves.
        moments = {rank: peer.heartbeat.moment for rank, peer in present.items()}
        positions = {rank: (moment.moves, bool(moment.waits_in)) for rank, moment in moments.items()}
        return "hangs", [rank for rank, position in positions.items() if position == min(positions.values())]
    return None


def describe(
    reason: str, blamed: Sequence[int], peers: Mapping[int, PeerState], *, limit: float, checkpoint: Path | None
) -> str:
    """One line: who, its last step and phase, what each of the others was waiting for, and how to resume.

    `limit`: the seconds of silence, or without progress, that `reason` stands for.
    """
    heartbeats = {rank: peer.heartbeat for rank, peer in peers.items()}
    others = [heartbeat for rank, heartbeat in heartbeats.items() if rank not in blamed and heartbeat.state == "alive"]
    verb = {
        "died": "died, last seen",
        "silent": f"gave no sign of life for {limit:.0f} s, last seen",
        "failed": "failed",
        "hangs": f"got no further for {limit:.0f} s (run.hang_timeout)",
    }[reason]
    causes = []
    for moment, group in _grouped([heartbeats[rank] for rank in blamed]):
        call = f" in {moment.waits_in}" if moment.waits_in else ""
        causes.append(f"{_ranks(group)} {verb} after step {moment.step}, in {moment.phase}{call}{_line(moment)}")
    errors = "".join(f": {heartbeats[rank].error}" for rank in blamed if heartbeats[rank].error)
    waits = []
    for moment, group in _grouped(others):
        call = f"waiting in {moment.waits_in}" if moment.waits_in else "busy"
        verb = "were" if len(group) > 1 else "was"
        waits.append(f"{_ranks(group)} {verb} {call}{_line(moment)} ({moment.phase} after step {moment.step})")
    waiting = "; ".join(waits)
    return "; ".join(part for part in ("; ".join(causes) + errors, waiting, how_to_resume(checkpoint)) if part)


def how_to_resume(checkpoint: Path | None) -> str:
    """A clause: the checkpoint that the next start takes."""
    return f"the same command resumes from {checkpoint}" if checkpoint else "there is no checkpoint to resume from"


def _line(moment: Moment) -> str:
    return f" at {moment.source_line}" if moment.source_line else ""


def _grouped(heartbeats: Sequence[Heartbeat]) -> list[tuple[Moment, list[int]]]:
    """Ranks that stand at the same place, in order of their first."""
    groups: dict[tuple[int, str, str, str], tuple[Moment, list[int]]] = {}
    for heartbeat in heartbeats:
        moment = heartbeat.moment
        groups.setdefault((moment.step, moment.phase, moment.source_line, moment.waits_in), (moment, []))[1].append(
            heartbeat.rank
        )
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
