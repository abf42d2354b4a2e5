"""Which checkpoint a run goes on from, and which are kept."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from zoo.config.locate import checkpoints
from zoo.engine.result import evaluations_by_step
from zoo.engine.saving import files
from zoo.errors import UserError

BEST = "best"  # a link in the folder of checkpoints
DAMAGED = "damaged_"  # prefix of the name that an unreadable checkpoint gets
_SMALLER_IS_BETTER = {"loss"}


def faults(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint's files; the ranks share the work and all know the result."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return files.faults(checkpoint)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, files.faults(checkpoint, dist.get_rank(), len(everyone)))
    return list(dict.fromkeys(fault for found in everyone for fault in found))


def refuse_faults(checkpoint: Path) -> None:
    """Raises UserError where a checkpoint's files are not those that were written."""
    found = faults(checkpoint)
    if found:
        raise UserError(f"{_told(found)}; take another checkpoint")


def _told(found: list[str]) -> str:
    return found[0] + (f" (and {len(found) - 1} more faults)" if len(found) > 1 else "")


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, None where a run has none yet; and what was passed over, name -> why."""

    folder: Path | None
    passed_over: dict[str, str] = field(default_factory=dict)


def choose(run_dir: Path) -> Chosen:
    """The newest whole checkpoint of a run. Newer ones that are not are put out of the way, and that is said.

    Called by all ranks alike. Raises UserError where there are checkpoints, but none that is whole.
    """
    passed_over: dict[str, str] = {}
    for checkpoint in reversed(_listed(run_dir)):
        found = faults(checkpoint)
        if not found:
            if passed_over:
                _put_away(run_dir, passed_over, checkpoint)
            return Chosen(checkpoint, passed_over)
        passed_over[checkpoint.name] = _told(found)
    if passed_over:
        newest = next(iter(passed_over.values()))
        raise UserError(
            f"{run_dir}: no checkpoint there is whole ({newest}); put one back, or use another run.dir to start anew"
        )
    return Chosen(None)


def _listed(run_dir: Path) -> list[Path]:
    """A run's checkpoints as the first rank sees them: a shared file system may show others to each."""
    found = [checkpoints(run_dir)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


def _put_away(run_dir: Path, passed_over: dict[str, str], checkpoint: Path) -> None:
    """Rename what is damaged, so that nothing takes it for the newest."""
    dist.barrier()  # the others have seen the names too
    if dist.get_rank() == 0:
        for name, why in passed_over.items():
            folder = run_dir / "checkpoints" / name
            print(
                f"zoo: WARNING: {why}; it is now {DAMAGED}{name}, and the run goes on from {checkpoint.name}",
                file=sys.stderr,
                flush=True,
            )
            files.remove([folder.with_name(DAMAGED + name)])
            with contextlib.suppress(OSError):
                os.replace(folder, folder.with_name(DAMAGED + name))
        best = run_dir / "checkpoints" / BEST
        if best.is_symlink() and not best.exists():
            best.unlink()
    dist.barrier()


def best_of(run_dir: Path, metric: str | None) -> Path | None:
    """Of a run's checkpoints that were evaluated, the one that is best at a held-out figure; of equals, the newest."""
    if metric is None:
        return None
    figures = evaluations_by_step(run_dir)
    sign = -1.0 if metric in _SMALLER_IS_BETTER else 1.0
    best: tuple[float, int, Path] | None = None
    for checkpoint in checkpoints(run_dir):
        step = int(checkpoint.name.rpartition("_")[2])
        value = figures.get(step, {}).get(metric)
        if value is not None and value == value and (best is None or (sign * value, step) >= best[:2]):
            best = (sign * value, step, checkpoint)
    return best[2] if best else None


def tidy(run_dir: Path, keep: int, metric: str | None) -> None:
    """Keep the newest checkpoints and the best one, which the link `best` names; the first rank calls it."""
    best = best_of(run_dir, metric)
    found = checkpoints(run_dir)
    if best is not None:
        link, new = best.with_name(BEST), best.with_name(f".partial-{BEST}")
        with contextlib.suppress(OSError):  # a file system without links; the log tells the best one too
            new.unlink(missing_ok=True)
            if not link.is_symlink():  # of a run folder that was copied with what links point to
                files.remove([link])
            new.symlink_to(best.name, target_is_directory=True)
            os.replace(new, link)
    files.remove(old for old in found[: len(found) - keep] if old != best)
