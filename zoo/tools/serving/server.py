"""A server of an exported folder, started on a free port of this machine and stopped on every path."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import UserError, printable
from zoo.subprocesses import module_command
from zoo.tools.serving.client import Client, is_ready
from zoo.tools.serving.folder import NAME, ServedFolder, transformers_command, vllm_command
from zoo.types import JsonMapping

START_SECONDS = 1800.0  # longest wait until a server answers
_POLL_SECONDS, _SAY_SECONDS, _STOP_SECONDS, _END_SECONDS = 0.5, 15.0, 30.0, 5.0
_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: |\berror: ")
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:(?:ERROR|INFO|WARNING) [\d\-: ]+\[[\w.]+:\d+\] )?")
_LAST, _ERRORS = 8, 3  # lines of a log that are shown
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Server:
    """Which server is asked.

    Attributes:
        served: vLLM's program, or transformers', by name or path, or the address of a running server.
        model: what a running server calls the model; None: it has one alone.
        arguments: further ones of the program.
        log: the file for its log; None: one in the temporary folder, which stays.
        seconds: longest wait until it answers.
        quiet: nothing is said of its start on stderr.
    """

    served: str
    model: str | None = None
    arguments: tuple[str, ...] = ()
    log: Path | None = None
    seconds: float = START_SECONDS
    quiet: bool = True

    @property
    def is_running(self) -> bool:
        """Whether somebody else has started it."""
        return self.served.startswith(("http://", "https://"))

    @property
    def only_answers(self) -> bool:
        """Whether it has no log-probabilities of prompts: `transformers serve`."""
        return not self.is_running and Path(self.served).name == "transformers"

    def check(self) -> None:
        """UserError where nothing answers at the address, or there is no such program."""
        if self.is_running:
            Client.connect(self.served, self.model)
            return
        program_of(self.served)

    @contextmanager
    def connect(self, folder: ServedFolder, longest: int, options: JsonMapping) -> Iterator[Client]:
        """A client of the server, which is started for the block where it is not running.

        Args:
            folder: what it serves.
            longest: tokens of the longest row.
            options: as `vllm_command` has them.
        """
        if self.is_running:
            yield Client.connect(self.served, self.model)
            return

        program = program_of(self.served)

        def command(port: int) -> list[str]:
            if self.only_answers:
                return transformers_command(program, folder, port, self.arguments)
            return vllm_command(program, folder, port, longest, options, self.arguments)

        with started(command, is_ready, seconds=self.seconds, log=self.log, quiet=self.quiet) as url:
            yield Client(url, folder.weights) if self.only_answers else Client.connect(url, NAME)


def program_of(served: str) -> str:
    """The path of a server's program, from its name or path.

    Raises:
        UserError: there is none.
    """
    program = shutil.which(os.path.expanduser(served))
    if program is None:
        raise UserError(
            f"served={served}: no such program on PATH; give its path (served=/path/to/venv/bin/vllm), the address of a running "
            "server (served=http://localhost:8000), or install vLLM in an environment of its own"
        )
    return program


@contextmanager
def started(
    make_command: Callable[[int], Sequence[str]],
    is_ready: Callable[[str], bool],
    *,
    seconds: float,
    log: Path | None,
    quiet: bool,
) -> Iterator[str]:
    """Start a server; gives its address while it runs, and stops it at the end of the block.

    Args:
        make_command: the command that serves at a port.
        is_ready: whether the server at an address answers.
        seconds: longest wait until it does.
        log: the file that its words go to; None: one in the temporary folder, which stays.
        quiet: nothing is said on stderr.

    Raises:
        UserError: it ends, or does not answer in time; with the last lines of its log.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = list(make_command(port))
    log = log or Path(tempfile.mkstemp(prefix="zoo-served-", suffix=".log")[1])
    _say(quiet, f"starting {shlex.join(command)}; its log: {log}")
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    with log.open("wb") as file:
        process = subprocess.Popen(
            module_command("zoo.tools.serving.guard", *command),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait(process, lambda: is_ready(url), command[0], seconds, log, quiet)
        try:
            yield url
        except UserError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)  # connections break before a server that fails has ended
            if process.poll() is None:
                raise
            raise UserError(f"{error}; the server has ended:\n{last_lines(log)}\nits log: {log}") from error
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], program: str, seconds: float, log: Path, quiet: bool
) -> None:
    """Return once the server answers; UserError where it ends before, or is too late."""
    began = time.monotonic()
    next_line = began + _SAY_SECONDS
    while not is_ready():
        waited = time.monotonic() - began
        if (code := process.poll()) is not None:
            ended = f"{program} ended after {waited:.0f} s with exit code {code}, before it answered"
            raise UserError(f"{ended}:\n{last_lines(log)}\nits log: {log}")
        if waited > seconds:
            raise UserError(
                f"{program} does not answer after {waited:.0f} s; give it longer with server_seconds=:\n{last_lines(log)}\nits log: {log}"
            )
        if time.monotonic() >= next_line:
            next_line += _SAY_SECONDS
            last = (_lines(log) or ["-"])[-1]
            _say(quiet, f"the server starts ({waited:.0f} s of {seconds:.0f}): {last}")
        time.sleep(_POLL_SECONDS)
    _say(quiet, f"the server answers after {time.monotonic() - began:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and all of its processes, also where this is interrupted."""
    try:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path) -> str:
    """The first errors in a server's log, and its last lines, indented."""
    lines = _lines(log)
    last = lines[-_LAST:]
    errors = [line for line in dict.fromkeys(lines) if _ERROR.search(line) and line not in last][:_ERRORS]
    return "\n".join(f"  {line}" for line in (*errors, *last)) or "  (its log is empty)"


def _lines(log: Path) -> list[str]:
    text = log.read_text(errors="replace")
    lines = (_PREFIX.sub("", line).rstrip() for line in text.replace("\r", "\n").splitlines())
    return [printable(line, 200) for line in lines if line.strip()]


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(f"zoo: {text}", file=sys.stderr, flush=True)
