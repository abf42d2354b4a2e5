"""Start a run: in this process, as a rank of torchrun or SLURM, or as several ranks of this machine.

Ranks started here live in sessions of their own, so that a Ctrl-C on the terminal reaches this process alone and
each rank gets every signal exactly once from it. Rank 0 writes to the terminal; the stderr of the others is kept, and
so is what any rank says of its failure: it is shown when it is known which rank failed by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from zoo.config.compose import is_saved_recipe, save_recipe
from zoo.config.devices import cores, cpu_threads, gpu_count
from zoo.config.entries import parse_entry
from zoo.config.memory import kernel_kills, killed_for_memory
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.defaults import with_defaults
from zoo.data.sources.tables import check_entry
from zoo.engine.distributed.process_state import untouched
from zoo.engine.distributed.processes import Launcher, end_with_parent
from zoo.engine.distributed.signals import (
    INTERRUPTED,
    LOST,
    PREEMPTED,
    REQUESTS,
    SAME_SECONDS,
    SIGNALS,
    Preempted,
    handled,
    leave_terminal,
)
from zoo.engine.launch.kernel_cache import keep_kernels
from zoo.engine.launch.slurm import join_slurm
from zoo.engine.planning.plan_process import planned
from zoo.engine.report.result import TrainResult
from zoo.engine.report.startup_time import STARTED
from zoo.engine.watchdog.run_lock import refuse_second
from zoo.errors import ConfigError, UserError

_POLL_SECONDS = 0.05
_MISTAKE_SECONDS = 1.0  # after a rank has found a user's mistake: time for the others to find it too
_SETTLE_SECONDS = 8.0  # after any other failure: time for the others to say who failed, and to leave
_TAIL_LINES = 20
MISTAKE = "zoo: error: "  # begins the line of a rank that has found a mistake of the user's
_STOPPED = (
    INTERRUPTED,
    PREEMPTED,
    *(-number for number in SIGNALS),
)  # exit codes of a rank that a signal ended


class WorkerError(RuntimeError):
    """A rank failed; what it had to say has been shown, and follows the first `line` of the message.

    `code` is the exit code to pass on.
    """

    def __init__(self, code: int, said: Sequence[str] = ()) -> None:
        self.line = f"a rank of the run failed with exit code {code}"
        super().__init__("\n".join((self.line, *said)))
        self.code = code
        self.told = code in (2, LOST) or code > 128  # in one line already


@untouched()
def launch(recipe: Recipe, *, here: bool = False) -> TrainResult:
    """Train `recipe` and return what came of it; also known as `zoo.train`.

    Under torchrun (RANK and WORLD_SIZE in the environment) or SLURM (its variables) this process is one rank. Otherwise `recipe.nproc`
    ranks run on this machine, by default one a GPU or a single one, as child processes: this one stays as it was,
    whatever happens to them, and has no memory of a GPU in use.

    Args:
        here: this process is zoo's own, as that of the command `zoo train` is: a single rank runs in it, which saves
            the seconds that a child takes to start. A run that hangs, or a second Ctrl-C, then ends the process.

    Raises:
        UserError: the recipe cannot run; see `prepare`.
        WorkerError: a child process failed, died or hung (`run.hang_timeout`).
        KeyboardInterrupt: child processes were stopped by a signal before there was anything to save.
    """
    recipe, ranks = prepare(recipe, here=here)
    if under_torchrun():
        end_with_parent()
    if under_torchrun() or (here and ranks == 1):
        from zoo.engine.train.trainer import train

        return train(recipe)
    return _train_in_children(recipe, ranks)


def prepare(recipe: Recipe, *, here: bool = True) -> tuple[Recipe, int]:
    """The validated recipe, with nothing left to plan, and its number of ranks, after a look at the files it names.

    `here`: a single rank will run in this process.

    Raises:
        ConfigError: the recipe cannot run on that many ranks or fits them under no layout, or its run folder cannot
            be one.
        UserError: a file of data.train or data.eval is not there.
    """
    join_slurm()
    ranks = world_size(recipe)
    _check_machine(recipe)
    keep_kernels()
    recipe = validate(planned(recipe, ranks, here=here), ranks)
    assert recipe.run.dir is not None  # derived by validate
    _check_run_dir(Path(recipe.run.dir))
    if not under_torchrun():  # there another rank of this run may hold it already
        refuse_second(Path(recipe.run.dir))
    for key, specs in (("data.train", recipe.data.train), ("data.eval", with_defaults(recipe.data).eval)):
        for spec in specs:
            check_entry(parse_entry(spec, key), key)
    return recipe, ranks


def _check_machine(recipe: Recipe) -> None:
    """A run is not started on another machine than it was planned for."""
    named, here = recipe.machine.gpus, gpu_count()
    if named is None or under_torchrun():
        return
    if recipe.machine.nodes > 1:
        raise ConfigError(
            f"hardware={recipe.hardware}: its {recipe.machine.nodes} nodes need a launcher: `zoo train --slurm-template` "
            f"writes a batch script for SLURM, or start torchrun on each (docs/launch.md)"
        )
    if recipe.hardware != "auto" and here < min(named, recipe.nproc or named):
        raise ConfigError(
            f"hardware={recipe.hardware}: a node of it has {named} GPUs and {here} can be seen here; "
            f"hardware=auto takes what is here (zoo plan and zoo show take any)"
        )


def _check_run_dir(folder: Path) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"run.dir={folder}: {existing} is a file; wanted a folder, which need not exist yet"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={folder}: no permission to write in {existing}; give another run.dir")
    config = folder / "config.yaml"
    if config.is_file() and not is_saved_recipe(config):
        raise ConfigError(
            f"run.dir={folder}: its config.yaml was not written by a run and would be overwritten; "
            f"give a folder of its own"
        )


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(recipe: Recipe) -> int:
    """Ranks the run will have: those of torchrun, else `nproc`, else one a GPU, else `nproc_cpu`."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    gpus = gpu_count()
    if recipe.nproc is None:
        return gpus or min(recipe.nproc_cpu, cores())
    if gpus and recipe.nproc > gpus:
        raise ConfigError(
            f"nproc={recipe.nproc}: a rank needs a GPU of its own and {gpus} can be seen; nproc={gpus} would work"
        )
    return recipe.nproc


@untouched()
def run_task(task: str, recipe: Recipe, ranks: int, argument: Any = None, fresh: bool = False) -> Any:
    """What the function `task` ("module:name") of a recipe returns on rank 0 of so many ranks.

    In this process where it is one rank, or a rank of torchrun; else in child processes, as `launch` does.

    Args:
        argument: a second argument of the function, as JSON takes it; None: it has none.
        fresh: one rank, too, is a child process, which leaves no memory in use.

    Raises:
        UserError: a mistake of the user's that a rank has found.
        WorkerError: a child process failed.
        KeyboardInterrupt: the ranks were stopped by a signal.
    """
    keep_kernels()
    recipe = validate(recipe, ranks)
    further = () if argument is None else (argument,)
    if under_torchrun():
        end_with_parent()
    if under_torchrun() or (ranks == 1 and not fresh):
        module, _, name = task.partition(":")
        return getattr(importlib.import_module(module), name)(recipe, *further)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        config, result = Path(folder) / "config.yaml", Path(folder) / "result"
        save_recipe(recipe, config)
        command = [sys.executable, "-m", "zoo.engine.launch.rank_main", str(config), task, str(result)]
        command += [json.dumps(value) for value in further]
        said: list[str] = []
        code = run_ranks(command, ranks, threads=recipe.engine.threads, said=said)
        _raise_stopped(code)
        _raise_failed(code, said)
        return pickle.loads(result.read_bytes())


def _train_in_children(recipe: Recipe, ranks: int) -> TrainResult:
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        config = Path(folder) / "config.yaml"
        save_recipe(recipe, config)
        command = [sys.executable, "-m", "zoo.engine.launch.rank_main", str(config)]
        said: list[str] = []
        code = run_ranks(command, ranks, threads=recipe.engine.threads, said=said)
    if code not in (INTERRUPTED, PREEMPTED):
        _raise_failed(code, said)
    assert recipe.run.dir is not None  # derived by validate
    if code and not _was_saved(recipe.run.dir):
        _raise_stopped(code)
    return TrainResult.from_run_dir(recipe.run.dir)


def _raise_stopped(code: int) -> None:
    """KeyboardInterrupt for the exit code of ranks that a signal ended."""
    if code in (INTERRUPTED, PREEMPTED):
        raise Preempted if code == PREEMPTED else KeyboardInterrupt


def _raise_failed(code: int, said: Sequence[str]) -> None:
    """UserError for a mistake of the user's that a rank has found, WorkerError for any other failure."""
    if code == 2 and len(said) == 1 and said[0].startswith(MISTAKE):
        raise UserError(said[0].removeprefix(MISTAKE))
    if code:
        raise WorkerError(code, said)


def _was_saved(run_dir: str) -> bool:
    """Whether the summary in the run folder is that of an interrupted run."""
    return (Path(run_dir) / "summary.json").is_file() and TrainResult.from_run_dir(run_dir).interrupted


def run_ranks(
    command: Sequence[str], ranks: int, threads: int | None = None, said: list[str] | None = None
) -> int:
    """Run `command` as `ranks` processes of one group on this machine and wait for all of them.

    A failing rank takes the others with it within seconds. The first of SIGNALS is passed on to every rank, and
    their end is awaited; the second kills them. What failed ranks have to say is shown on stderr, and put into `said` where
    that is given: a mistake of the user's is then left to the caller to tell.

    Returns:
        0 when all ranks ended well; 130 when they ended on SIGINT and 75 when they ended on one of REQUESTS; 76 when
        they left because one died, hangs or is silent; else the code of a failed rank (128 + number of the signal that
        killed it).
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared[STARTED] = os.environ.get(STARTED, str(time.time()))
    shared["OMP_NUM_THREADS"] = str(cpu_threads(threads, ranks))
    with Launcher() as here, _Group(here) as group, _signals() as received:
        for rank in range(ranks):
            if not received:
                group.start(command, {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        return _supervise(group, received, said)


def _supervise(group: _Group, received: Sequence[int], said: list[str] | None) -> int:
    """Wait for the ranks, acting on failures and on the signals that come in; returns the exit code."""
    seen = 0
    while group.running():
        if len(received) > seen:
            seen += 1
            if seen == 1:
                group.signal(received[0])
            else:
                group.kill()
        elif group.failed() and seen < 2:
            group.settle()
            break
        time.sleep(_POLL_SECONDS)
    failed = [] if seen > 1 else group.failed()
    if failed:
        group.kill()
        return group.explain(failed, said)
    if seen > 1:
        return INTERRUPTED if received[1] == signal.SIGINT else PREEMPTED
    return group.stopped(received)


class _Group:
    """The ranks' processes, in order of rank."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.processes: list[subprocess.Popen[bytes]] = []
        self._kills = kernel_kills()
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-ranks-")

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the next rank; rank 0 keeps this process's stdout and stderr."""
        rank = len(self.processes)
        with ExitStack() as stack:
            out, err = None, None
            if rank > 0:
                out, err = subprocess.DEVNULL, stack.enter_context(self._log(rank).open("ab"))
            env = {**env, **self._launcher.environment, "ZOO_LAST_WORDS": str(self._log(rank))}
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=self._launcher.files,
            )
        self.processes.append(process)

    def running(self) -> list[subprocess.Popen[bytes]]:
        """The ranks that have not ended."""
        return [process for process in self.processes if process.poll() is None]

    def failed(self) -> list[int]:
        """The ranks that ended badly; to end on a signal that asks for it is not to fail."""
        codes = [process.poll() for process in self.processes]
        return [rank for rank, code in enumerate(codes) if code not in (None, 0, *_STOPPED)]

    def stopped(self, received: Sequence[int]) -> int:
        """The exit code of ranks that ended well or on a signal, also where none was started because of one."""
        codes = [process.poll() for process in self.processes] or [-number for number in received]
        asked = [code for code in codes if code in _STOPPED]
        if not asked:
            return 0
        return INTERRUPTED if asked[0] in (INTERRUPTED, -signal.SIGINT) else PREEMPTED

    def settle(self) -> None:
        """Give the ranks that a failure drags along a moment, to tell cause from effect."""
        began = time.monotonic()
        while self.running():
            mistaken = any(self.processes[rank].returncode == 2 for rank in self.failed())
            if time.monotonic() - began > (_MISTAKE_SECONDS if mistaken else _SETTLE_SECONDS):
                return
            time.sleep(_POLL_SECONDS)

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank that runs."""
        for process in self.running():
            process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to every rank that runs and to what it has started."""
        for process in self.running():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def explain(self, failed: Sequence[int], said: list[str] | None = None) -> int:
        """Show what the failed ranks left on stderr, where rank 0 has not said it already; their exit code."""
        codes = {rank: self.processes[rank].returncode for rank in failed}
        mistakes = [rank for rank in failed if codes[rank] == 2]
        causes = mistakes[:1] or [rank for rank in failed if codes[rank] != LOST]
        words = [self._last_words(rank, codes[rank]) for rank in causes]
        for verdict in sorted(Path(self._folder.name).glob("*.verdict"))[:1]:
            words.append(f"zoo: {verdict.read_text(encoding='utf-8').strip()}")
        if said is None or not (len(words) == 1 and words[0].startswith(MISTAKE)):
            print(*words, sep="\n", end="\n" if words else "", file=sys.stderr)
        if said is not None:
            said += words
        code = codes[(causes or list(failed))[0]]
        return code if code > 0 else 128 - code

    def _last_words(self, rank: int, code: int) -> str:
        log = self._log(rank)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        if code == 2:
            return "\n".join(lines[-1:]) or f"zoo: rank {rank} {_ending(code, self._kills)}"
        tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f"zoo: rank {rank} {_ending(code, self._kills)}" + (
            f"; its last lines:\n{tail}" if tail else ""
        )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.stderr"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that come in meanwhile, instead of what they would do."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if number == signal.SIGHUP:
            leave_terminal()
        requests = number in REQUESTS and all(earlier in REQUESTS for earlier in received)
        if received and requests and time.monotonic() - first < SAME_SECONDS:
            return
        first = first or time.monotonic()
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield received
        return
    before = {number: signal.signal(number, note) for number in handled()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(code: int, kills: int) -> str:
    """How a process ended, in words; `kills`: `kernel_kills` when it was started."""
    if code >= 0:
        return f"failed with exit code {code}"
    why = killed_for_memory(kills) if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{why}"


def free_port() -> int:
    """A port that nobody has, below those that systems give to outgoing connections: none takes it before rank 0 does."""
    draw = random.SystemRandom()  # not seeded as a run is: two that start together draw differently
    while True:
        port = draw.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
