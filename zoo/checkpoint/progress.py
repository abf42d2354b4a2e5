"""How far a save is, while it is written: for the run's own log, and for whoever looks at the run's folder.

Beside the files that a save is writing lies `saving.json`: how many bytes they will have, and since when. Their sizes say
the rest, so no rank has to report. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import UserError, part_of, size
from zoo.files import file_clock, read_object, write_atomically
from zoo.records import conforms, is_count

PARTIAL = ".partial-"  # prefix of all that is not yet, or no longer, a checkpoint
FILE = "saving.json"


@dataclass(frozen=True)
class Saving:
    """A save that is being written, or copied on. Sizes in bytes."""

    step: int
    written: int
    total: int
    seconds: float  # since it was begun
    copying: bool = False  # from run.stage to the run folder

    def __str__(self) -> str:
        rate = self.written / self.seconds if self.seconds > 0 else 0.0
        done = part_of(self.written, self.total)
        text = f"copying {done} to run.dir" if self.copying else f"saving {done}"
        return f"{text}, {size(rate)}/s"


def begin(folder: Path, step: int, total: int, copied_to: str | None = None) -> None:
    """Say that so many bytes will be written into a folder; `end` takes it back.

    `copied_to`: they are copied, into the folder of that name beside it or into itself.
    """
    content = {"step": step, "bytes": total, "time": time.time(), "copied_to": copied_to}
    write_atomically(folder / FILE, json.dumps(content) + "\n", durable=False)


def end(folder: Path) -> None:
    """End the progress of a save: all its files are written."""
    (folder / FILE).unlink(missing_ok=True)


def saving(run_dir: Path) -> Saving | None:
    """The save that a run is writing, or that it was writing when it was killed; None where there is none."""
    for path in sorted(run_dir.glob(f"checkpoints/{PARTIAL}iter_*/{FILE}")):
        try:
            content = read_object(path)
            if not conforms(content, {"step": is_count, "bytes": is_count}, ("step", "bytes")):
                continue
            into = content.get("copied_to")
            into = into if isinstance(into, str) and Path(into).name == into else None
            with os.scandir(path.parent.with_name(into) if into else path.parent) as entries:
                written = sum(entry.stat().st_size for entry in entries if entry.name.endswith(".bin"))
            seconds = max(0.0, file_clock(path.parent) - path.stat().st_mtime)
            return Saving(content["step"], min(written, content["bytes"]), content["bytes"], seconds, bool(into))
        except (OSError, ValueError, UserError):  # it has just ended, or somebody else wrote there
            continue
    return None
