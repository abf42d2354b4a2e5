"""Start a run: in this process, as a rank of torchrun or SLURM, or as several ranks of this machine."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zoo.config.compose import load_recipe, save_recipe
from zoo.config.entries import parse_entry
from zoo.config.hub import push
from zoo.config.layers.layer import Overrides
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading import worker_processes
from zoo.errors import UserError
from zoo.files import read_object
from zoo.launch.callback_copies import copied
from zoo.launch.kernel_cache import keep_kernels
from zoo.launch.objects import with_files
from zoo.launch.prepare import prepare, under_torchrun
from zoo.launch.rank_group import MISTAKE, RankGroup, received_signals, run_ranks
from zoo.logging import terminal
from zoo.logging.result import TrainResult
from zoo.parallel.megatron.core_import import import_core, importing
from zoo.parallel.process_state import preserve_process_state
from zoo.parallel.processes import end_with_parent
from zoo.parallel.signals import INTERRUPTED, LOST, PREEMPTED, Preempted
from zoo.subprocesses import module_command


class WorkerError(RuntimeError):
    """A rank failed. Its messages are on stderr already; they follow the first `line` of the error's own message.

    `code` is the exit code to pass on; `reported` says whether stderr has the cause as one line.
    """

    def __init__(self, code: int, messages: Sequence[str] = ()) -> None:
        self.line = f"a rank of the run failed with exit code {code}"
        super().__init__("\n".join((self.line, *messages)))
        self.code = code
        self.reported = code in (2, LOST) or code > 128


@preserve_process_state()
@worker_processes.ended()
def launch(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    data: object = None,
    eval_data: object = None,
    callbacks: Sequence[object] = (),
    in_process: bool = False,
    announce: Callable[[Recipe, int], object] | None = None,
) -> TrainResult:
    """Train `recipe` and return the result; also known as `zoo.train`.

    Under torchrun (RANK and WORLD_SIZE in the environment) or SLURM (its variables) this process is one rank. Otherwise
    `recipe.nproc` ranks run on this machine as child processes, by default one per GPU, or a single one without a GPU: this
    process stays as it was whatever happens to them, and uses no memory of a GPU.

    Args:
        recipe: as `zoo.load_recipe` takes it: a `zoo.Recipe`, composed or built by hand, a recipe's name, or a path of its file.
        overrides: of its keys, as `zoo.load_recipe` takes them.
        data: in the place of data.train: rows (a list of dicts with pictures, arrays and bytes in them, any iterable of
            these, a datasets.Dataset, a pandas DataFrame) or entries. Rows are written to the run folder once, for all ranks to map.
        eval_data: the same in the place of data.eval.
        callbacks: objects with some of on_start, on_step, on_eval, on_predictions, on_save and on_end, each taking a
            `zoo.Event`, beside those of run.callbacks. Rank 0 calls them; where it is a child process, it has copies of them.
        in_process: this process belongs to zoo, as in the command `zoo train`: a single rank without functions of users runs in it,
            which saves the seconds that a child takes to start. A run that hangs, or a second Ctrl-C, then ends the process.
        announce: called with the planned recipe and the number of ranks, once nothing speaks against the run.

    Raises:
        UserError: the recipe cannot run; see `prepare`. Or a callback can't be copied to a child process, or fails.
        WorkerError: a child process failed, died or hung (`run.hang_timeout`).
        KeyboardInterrupt: child processes were stopped by a signal before there was anything to save.
    """
    recipe = with_files(load_recipe(recipe, overrides), data, eval_data)
    specs = [*(("data.train", spec) for spec in recipe.data.train), *(("data.eval", spec) for spec in recipe.data.eval)]
    own_formats = any(":" in (parse_entry(spec, key).format or "") for key, spec in specs)
    in_process = in_process and not (
        callbacks or recipe.run.callbacks or own_formats
    )  # users' functions may end a process
    with ExitStack() as stack:
        children: list[Callable[[Recipe, list[str]], int]] = []

        def start(ranks: int) -> None:
            """Import what a rank needs, if this process plans while another one could; or start those that do so."""
            if under_torchrun() or (ranks == 1 and in_process):
                worker_processes.start_ahead(recipe.data)
            if under_torchrun():
                import_core()
            elif ranks > 1 or not in_process:
                children.append(stack.enter_context(waiting_ranks(recipe, ranks, callbacks)))

        planned, ranks = prepare(recipe, in_process=in_process, meanwhile=start)
        if announce is not None:
            announce(planned, ranks)
        if children:
            return _pushed(planned, _train_in_children(children[0], planned, ranks))
    if under_torchrun():
        end_with_parent()
    terminal.set_status("importing PyTorch and Megatron-Core")
    with importing(own=in_process):
        import_core()
        from zoo.training.trainer import run_rank

    return _pushed(planned, run_rank(planned, callbacks))


@preserve_process_state()
def run_task(task: str, recipe: Recipe, ranks: int, argument: object = None, fresh: bool = False) -> Any:
    """Call the function `task` ("module:name") with a recipe on every rank; return what rank 0 returned.

    The call is in this process for a single rank and for a rank of torchrun, else in child processes as in `launch`.

    Args:
        argument: a second argument for the function, a JSON value; None: it takes no second argument.
        fresh: run even a single rank as a child process, which leaves no memory in use.

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
        import_core()
        module, _, name = task.partition(":")
        return getattr(importlib.import_module(module), name)(recipe, *further)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        config, result = Path(folder) / "config.yaml", Path(folder) / "result"
        save_recipe(recipe, config)
        command = module_command("zoo.launch.rank_main", str(config), task, str(result))
        command += [json.dumps(value) for value in further]
        messages: list[str] = []
        code = run_ranks(command, ranks, threads=recipe.engine.threads, messages=messages)
        _raise_stopped(code)
        _raise_failed(code, messages)
        return pickle.loads(result.read_bytes())


@contextmanager
def waiting_ranks(
    recipe: Recipe, ranks: int, callbacks: Sequence[object] = ()
) -> Iterator[Callable[[Recipe, list[str]], int]]:
    """Start `ranks` ranks, which import what they need while their recipe is planned; those that run at the end of the block are killed.

    Args:
        recipe: as asked for. Its backend says what the ranks import.
        callbacks: of zoo.train.

    Yields:
        a function that has them train the planned recipe; it returns the exit code, and takes `messages` as `run_ranks`.

    Raises:
        UserError: a callback can't be copied.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder, RankGroup() as group:
        asked, config, copies = (Path(folder) / name for name in ("asked.yaml", "config.yaml", "callbacks"))
        save_recipe(recipe, asked)
        command = module_command("zoo.launch.rank_main", str(config), "--asked", str(asked))
        if callbacks:
            copies.write_bytes(copied(callbacks))
            command += ["--callbacks", str(copies)]

        def train(planned: Recipe, messages: list[str]) -> int:
            save_recipe(planned, config)
            with received_signals() as received:
                return group.supervise(received, messages)

        group.start_all(command, ranks, recipe.engine.threads)
        yield train


def _train_in_children(train: Callable[[Recipe, list[str]], int], recipe: Recipe, ranks: int) -> TrainResult:
    messages: list[str] = []
    terminal.set_status(f"starting {ranks} rank{'s' if ranks > 1 else ''}")
    terminal.hand_over()
    code = train(recipe, messages)
    if code not in (INTERRUPTED, PREEMPTED):
        _raise_failed(code, messages)
    run_dir = recipe.run.dir
    assert run_dir is not None  # derived by validate
    saved = (Path(run_dir) / "summary.json").is_file() and TrainResult.from_run_dir(run_dir).interrupted
    if code and not saved:
        _raise_stopped(code)
    return TrainResult.from_run_dir(run_dir)


def _pushed(recipe: Recipe, result: TrainResult) -> TrainResult:
    """The result, after its export is pushed to `hub.repo`: by the first rank, when all ranks have left the run."""
    if recipe.hub.repo is None or os.environ.get("RANK", "0") != "0":
        return result
    exported = read_object(Path(result.run_dir) / "summary.json").get("export")
    if exported and Path(exported).is_dir():
        url = push(Path(exported), recipe.hub.repo, "hub.repo", private=recipe.hub.private)
        print(f"pushed to {url}", flush=True)
    return result


def _raise_stopped(code: int) -> None:
    """KeyboardInterrupt for the exit code of ranks that a signal ended."""
    if code in (INTERRUPTED, PREEMPTED):
        raise Preempted if code == PREEMPTED else KeyboardInterrupt


def _raise_failed(code: int, messages: Sequence[str]) -> None:
    """UserError for a mistake of the user's that a rank has found, WorkerError for any other failure."""
    if code == 2 and len(messages) == 1 and messages[0].startswith(MISTAKE):
        raise UserError(messages[0].removeprefix(MISTAKE))
    if code:
        raise WorkerError(code, messages)
