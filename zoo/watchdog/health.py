"""`health.json` of a run folder: the state of all ranks, written every few seconds by rank 0. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from zoo.errors import UserError
from zoo.files import file_clock, read_object, write_atomically
from zoo.parallel.processes import birth, machine
from zoo.records import Check, conforms, is_count, is_number, is_text, is_time
from zoo.types import JsonObject
from zoo.watchdog.diagnosis import PeerState

_STALE = 30.0  # seconds after which a health.json of another machine's is of a run that is gone
HEALTH = "health.json"
_FIELDS: dict[str, Check] = {"time": is_time, "every": is_number}
_WRITER: dict[str, Check] = {"machine": is_text, "pid": is_count}
_RANK: dict[str, Check] = {
    "rank": is_count, "step": is_count, "phase": is_text, "place": is_text, "waits_in": is_text,
    "phase_seconds": is_number, "silent_seconds": is_number, "stuck_seconds": is_number,
}  # fmt: skip


def write_health(folder: Path, peers: Mapping[int, PeerState], every: float) -> None:
    """Write health.json, where the run has a log already; `every`: seconds between two heartbeats of a rank."""
    if not (folder / "train.jsonl").is_file():
        return
    now = time.monotonic()
    ranks = []
    for rank, peer in sorted(peers.items()):
        moment, silent, stuck = peer.heartbeat.moment, now - peer.heard, now - peer.moved
        ranks.append({
            "rank": rank, "state": peer.heartbeat.state, "step": moment.step, "phase": moment.phase,
            "phase_seconds": round(moment.seconds + silent, 1), "silent_seconds": round(silent, 1),
            "stuck_seconds": round(stuck, 1), "place": moment.source_line, "waits_in": moment.waits_in,
            "machine": peer.heartbeat.host,
        })  # fmt: skip
    writer = {"machine": machine(), "pid": os.getpid(), "born": birth(os.getpid())}
    content = {"time": round(time.time(), 3), "every": every, "writer": writer, "ranks": ranks}
    write_atomically(folder / HEALTH, json.dumps(content) + "\n", durable=False)  # the next comes soon


def read_health(folder: Path) -> JsonObject | None:
    """The last health.json with its `age` in seconds and `alive`, whether the run seems to exist; None without a readable file.

    It also has `written`, its time by the clock of the file system. The age is by that clock, which a run's machine need not
    share; on the run's own machine by that one's, too, as in a folder where a reader may write nothing.
    """
    path = folder / HEALTH
    try:
        content, written = read_object(path), path.stat().st_mtime
        age = file_clock(folder) - written
    except (UserError, OSError):
        return None
    writer = content.get("writer")
    if not conforms(content, _FIELDS, (*_FIELDS, "ranks")) or not conforms(writer, _WRITER, ("machine", "pid", "born")):
        return None
    ranks = content["ranks"]
    if not isinstance(ranks, list) or not all(conforms(rank, _RANK, tuple(_RANK)) for rank in ranks):
        return None
    if writer["machine"] == machine():
        alive = writer["born"] is not None and birth(writer["pid"]) == writer["born"]
        age = min(age, abs(time.time() - content["time"]))
    else:
        alive = age < _STALE + 3 * content["every"]
    return {**content, "alive": alive, "age": max(0.0, age), "written": written}
