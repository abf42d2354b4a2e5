"""What a run reports when a resource of the machine is used up: disk, memory of a GPU, memory of the host.

Each case becomes one sentence with the numbers and the settings that would help, whichever library has failed and whatever
its message is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from zoo.config.derived import STAGED, stage_folder
from zoo.config.memory import limits, ran_out
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError, disk, file_error, size
from zoo.parallel.processes import FAILURE_LOG, Launcher, end_with_parent
from zoo.planner.plan import checkpoint_bytes, shortage
from zoo.subprocesses import module_command

# An OSError without a file's name is one of the run folder's if it is one of these.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO}
PLAN_SECONDS = 60.0  # longest time that the planner may take when memory has run out
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", FAILURE_LOG)
# What oneDNN reports for any of its failures, also where it could not allocate memory.
_ONEDNN = re.compile(r"could not (?:create|execute) a (?:primitive|memory)")
_LITTLE = 2**28  # bytes left to a process whose failure in oneDNN is counted as one for want of memory
# torch's own message for a failed write
_WRITER = re.compile(r"inline_container|PytorchStreamWriter|Worker failure")


@contextmanager
def translate_resource_errors(recipe: Recipe, *, memory_alone: bool = False) -> Iterator[None]:
    """Raise a UserError where a resource is used up inside the block."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        mistake = _memory(error, recipe) if memory_alone else explain(error, recipe)
        if mistake is None:
            raise
        raise mistake from error


def translate_oom_errors(recipe: Recipe) -> AbstractContextManager[None]:
    """`translate_resource_errors` for memory alone, to be entered where other ranks still wait.

    Planning takes seconds, and a launcher ends the other ranks soon after the first has ended.
    """
    return translate_resource_errors(recipe, memory_alone=True)


def explain(error: BaseException, recipe: Recipe) -> UserError | None:
    """The UserError that names the resource which an error shows to be used up; None where it shows none."""
    mistake = _memory(error, recipe)
    if mistake is not None:
        return mistake
    run_dir = Path(recipe.run.dir or ".")
    for cause in _causes(error):
        if isinstance(cause, OSError) and (cause.filename is not None or cause.errno in DISK):
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            return file_error(cause, _full(run_dir), _space_remedy(recipe, cause.filename) if full else "")
        if isinstance(cause, RuntimeError) and _WRITER.search(str(cause)):
            return _unwritten(run_dir, recipe)
    return None


def _memory(error: BaseException, recipe: Recipe) -> UserError | None:
    for cause in _causes(error):
        if isinstance(cause, torch.OutOfMemoryError):
            return _gpu(str(cause), recipe)
        # oneDNN does not report as such that hardly any memory is left.
        onednn = isinstance(cause, RuntimeError) and _ONEDNN.search(str(cause)) is not None
        if ran_out(cause) or (onednn and any(limit.left < _LITTLE for limit in limits())):
            return _cpu(str(cause), recipe)
    return None


def _full(run_dir: Path) -> Path:
    """Where a write may have failed that names no file: the run folder, unless another disk alone has no space."""
    folders = (run_dir, Path(tempfile.gettempdir()), Path.cwd())  # the last: where output may be sent to
    spaces = [(folder, disk(folder)) for folder in folders]
    return next((folder for folder, space in spaces if space is None or space[0] < 2**24), run_dir)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes, and errors of other threads that it holds."""
    yield error
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint: (exception, stack) by rank
    for failure in failures.values() if isinstance(failures, dict) else ():
        yield from _causes(failure[0])
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _gpu(text: str, recipe: Recipe) -> UserError:
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    whole = re.search(r"total capacity of ([\d.]+ \w+)", text)
    details = [f"{asked[1]} more were asked for"] if asked else []
    details += [f"it has {whole[1]}"] if whole else []
    shown = f" ({', '.join(details)})" if details else ""
    return UserError(f"the GPU's memory is full{shown}: {_shortage(recipe, on_gpu=True)}")


def _cpu(text: str, recipe: Recipe) -> UserError:
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    more = f" ({size(int(asked[1]))} more were asked for)" if asked else ""
    bounds = limits()
    where = f"; {bounds[0].name} is {size(bounds[0].total)}" if bounds else ""
    return UserError(
        f"the host's memory is used up{more}{where}: {_shortage(recipe, on_gpu=False)}; besides, data.cache_mb="
        f"{recipe.data.cache_mb} MiB a rank may go to processed samples"
    )


def _shortage(recipe: Recipe, *, on_gpu: bool) -> str:
    """The planner's estimates, by a process of its own: this one has no memory to plan with."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    command = module_command("zoo.watchdog.resources", ranks, str(int(on_gpu)))
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    env["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with Launcher() as launcher:
            done = subprocess.run(
                command, env={**env, **launcher.environment}, input=pickle.dumps(recipe), capture_output=True,
                timeout=PLAN_SECONDS, check=True, pass_fds=launcher.files,
            )  # fmt: skip
        return done.stdout.decode().strip().splitlines()[-1]
    except (OSError, MemoryError, subprocess.SubprocessError, IndexError):
        return "set packing.budget lower, or engine.recompute=full, or take more GPUs with parallel.tp, pp, cp or ep"


def _unwritten(run_dir: Path, recipe: Recipe) -> UserError:
    """The error for a file of tensors that was cut short, where no library has kept the system's error."""
    try:
        with (run_dir / ".probe").open("wb") as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        mistake = file_error(error, run_dir, _space_remedy(recipe))
        assert mistake is not None
        return mistake
    finally:
        with contextlib.suppress(OSError):
            (run_dir / ".probe").unlink()
    space = disk(run_dir)
    free = f" ({size(space[0])} of {size(space[1])} are free now)" if space else ""
    return UserError(
        f"{run_dir}: a checkpoint was cut short, as on a full disk{free}; free some{_space_remedy(recipe)}"
    )


def _space_remedy(recipe: Recipe, path: object = None) -> str:
    """The disk space that a run needs, as the end of a sentence; `path`: the file that could not be written."""
    try:
        checkpoint = checkpoint_bytes(recipe)
    except (RuntimeError, OSError, MemoryError):  # the failure that is being explained is the one to report
        checkpoint = None
    if checkpoint is None:
        return ""
    stage = stage_folder(recipe)
    if stage is not None and str(path).startswith(f"{stage}/"):
        return f": a checkpoint takes about {size(checkpoint)}, and run.stage holds up to {STAGED}"
    keep = recipe.train.keep
    return (
        f", or set train.keep lower: a checkpoint takes about {size(checkpoint)}, and {keep + 1} are there while one is "
        f"written (train.keep={keep})"
    )


if __name__ == "__main__":  # see `_shortage`
    end_with_parent()
    recipe = validate(pickle.loads(sys.stdin.buffer.read()), int(sys.argv[1]))
    print(shortage(recipe, int(sys.argv[1]), on_gpu=sys.argv[2] == "1"))
