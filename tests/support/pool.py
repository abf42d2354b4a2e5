"""A pool of rank processes that tests share: started at first need, one thread a rank, imports done once.

    results = pool.run(4, function, *arguments)      # function(rank, size, *arguments) on ranks 0 to 3

`function` is importable (it lives in `support`, say) and starts its own process groups through
`zoo.parallel.world.world`; each call gets the launcher's variables with a port of its own. What a rank raises is raised
here with its traceback. After a failure, a death or a timeout the processes are replaced, so that no test inherits
what another left behind.

Ranks are forked from one process that has imported everything (multiprocessing's forkserver): the first start costs
its imports, and new ranks cost next to nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from zoo.launch.rank_group import free_port

CALLS = 8  # after which new ranks replace them, which costs little: what calls leave behind ends there
START_SECONDS = 300.0  # imports of all ranks
SETTLE_SECONDS = 10.0  # after a rank failed: time for the others to end too, on a busy machine
_LAST_LINES = 25
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_IMPORTED_ONCE = [
    "torchvision",
    "matplotlib.pyplot",
    "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "zoo.training.trainer",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "zoo.nn.vision_language",
    "zoo.steps.vision",
    "zoo.data.processors.timestamped",
    "zoo.models.qwen25_vl.model",
    "zoo.models.qwen25_vl.processor",
    "zoo.models.qwen25_vl.step",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "zoo.models.qwen3_asr.model",
    "zoo.models.qwen3_asr.processor",
    "zoo.models.qwen3_asr.step",
    "zoo.models.qwen25_omni.model",
    "zoo.models.qwen25_omni.processor",
    "zoo.models.qwen25_omni.step",
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
    "zoo.models.gemma3.model",
    "zoo.models.gemma3.processor",
    "zoo.models.gemma3.step",
    "transformers.models.gemma3.modeling_gemma3",
    "zoo.models.gemma4.model",
    "zoo.models.gemma4.processor",
    "zoo.models.gemma4.step",
    "transformers.models.gemma4.modeling_gemma4",
    "zoo.models.glm45v.model",
    "zoo.models.glm45v.processor",
    "zoo.models.glm45v.step",
    "transformers.models.glm4v_moe.modeling_glm4v_moe",
    "zoo.models.llava.model",
    "zoo.models.llava.processor",
    "zoo.models.llava.step",
    "transformers.models.llava_onevision.modeling_llava_onevision",
    "zoo.models.internvl.model",
    "zoo.models.internvl.processor",
    "zoo.models.internvl.step",
    "zoo.models.qwen3_omni.model",
    "zoo.models.qwen3_omni.processor",
    "zoo.steps.omni",
]


class PoolError(AssertionError):
    """A rank raised, died or did not answer; the message holds what is known of each rank."""


class Pool:
    """Up to `size` rank processes; see the module's docstring."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._ranks: list[_Rank] = []
        self._calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        atexit.register(self.close)  # in case nobody does: multiprocessing waits for its processes

    def run[R](self, size: int, function: Callable[..., R], *arguments: Any, timeout: float = 120.0) -> list[R]:
        """The results of function(rank, size, *arguments) on ranks 0 to size-1, in that order.

        Raises PoolError where a rank raises or dies, or after `timeout` seconds.
        """
        assert size <= self.size, f"{size} ranks of a pool of {self.size}"
        if self._calls >= CALLS:
            self.close()
        self._start()
        self._calls += 1
        message = pickle.dumps((size, free_port(), function, arguments))
        ranks = self._ranks[:size]
        for rank in ranks:
            rank.connection.send_bytes(message)
        answers = self._collect(ranks, timeout)
        if len(answers) == size and all(ok for ok, _ in answers.values()):
            return [answers[rank.index][1] for rank in ranks]
        report = _report(ranks, answers, timeout)
        self.close()
        raise PoolError(report)

    def _start(self) -> None:
        if self._ranks:
            return
        self._ranks = [_Rank(index, Path(self._folder.name)) for index in range(self.size)]
        answers = self._collect(self._ranks, START_SECONDS)
        if len(answers) < self.size:
            report = _report(self._ranks, answers, START_SECONDS)
            self.close()
            raise PoolError(f"the pool did not start\n{report}")

    @staticmethod
    def _collect(ranks: list[_Rank], timeout: float) -> dict[int, tuple[bool, Any]]:
        """(whether it ended well, result or traceback) by rank, in order of arrival; a dead or late one is left out."""
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {rank.connection: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank.index] = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionError):
                    deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
                else:
                    if not answers[rank.index][0]:
                        deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        return answers

    def close(self) -> None:
        """End all processes; the next `run` starts others."""
        self._calls = 0
        for rank in self._ranks:
            rank.end()
        self._ranks = []


class _Rank:
    """One process, the way to talk to it, and the file its output goes to."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.log = folder / f"rank{index}.log"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED_ONCE)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(index, theirs, str(self.log)))
        with pytest.MonkeyPatch.context() as patch:  # the first rank to start gives its environment to all
            for name, value in _ENVIRONMENT.items():
                patch.setenv(name, value)
            self.process.start()
        theirs.close()

    def stacks(self) -> None:
        """Have a rank that is stuck write to its log where it stands."""
        assert self.process.pid is not None  # 0 would be pytest's own group
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def end(self) -> None:
        """Let the process go, or end it with its children (mcore's checkpoint writer has one) where it is stuck."""
        self.connection.close()
        self.process.join(timeout=3.0)
        if self.process.exitcode is None:
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # where it died before it had a group of its own
            self.process.join()


def _report(ranks: list[_Rank], answers: dict[int, tuple[bool, Any]], timeout: float) -> str:
    """What became of each rank: the first to fail comes first."""
    parts = [f"rank {index} raised\n{text}" for index, (ok, text) in answers.items() if not ok]
    for rank in ranks:
        if rank.index in answers:
            continue
        code = rank.process.exitcode
        if code is not None or not rank.process.is_alive():
            headline = f"rank {rank.index} died with exit code {rank.process.exitcode}"
        else:
            rank.stacks()
            headline = f"rank {rank.index} did not answer within {timeout:g} s, or after another one failed"
        lines = rank.log.read_text(errors="replace").splitlines() if rank.log.exists() else []
        parts.append("\n".join([f"{headline}; its last lines:", *lines[-_LAST_LINES:]]))
    return "\n".join(parts)


def _serve(index: int, connection: Connection, log: str) -> None:
    """A rank's life: one call after the other until the pipe is closed."""
    os.setsid()  # a group of its own: Ctrl-C is for pytest, and `end` reaches the rank's children
    with open(log, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True, file=sys.stderr)
    connection.send_bytes(pickle.dumps((True, None)))
    gc.freeze()  # imports: a collection needs not look at them
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(index, message))
        _free()


def _free() -> None:
    """Let models go, and with them the process groups that they hold: each has threads that wake up 100 times a second."""
    from zoo.training.optimization import release_ddp

    release_ddp([one for one in gc.get_objects() if type(one).__name__ == "DistributedDataParallel"])
    gc.collect()


def _answer(index: int, message: bytes) -> bytes:
    """The pickled result or traceback of one call."""
    try:
        size, port, function, arguments = pickle.loads(message)
        os.environ.update(
            RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        return pickle.dumps((True, function(index, size, *arguments)))
    except BaseException:  # SystemExit and KeyboardInterrupt of the function under test are answers too
        return pickle.dumps((False, traceback.format_exc()))
