"""Functions of users (callbacks, formats, scores, their modules): whatever they do is an error that names them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zoo import user_code
from zoo.data.errors import RowError
from zoo.data.sources.formats.choose import find_format
from zoo.errors import UserError
from zoo.generation.scores.choose import Scores
from zoo.launch.rank_group import run_ranks
from zoo.registry import imported
from zoo.user_code import calling
from zoo.watchdog.progress import Progress

MODULE = """
import sys

def leaves(*arguments):
    sys.exit(0)
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "functions_of_a_user.py"
    path.write_text(MODULE)
    return f"{path}:leaves"


def test_sys_exit_is_an_error_of_the_function_or_of_the_module(module: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"leaves refuses the row: UserCodeError: it raised SystemExit\(0\)"):
        find_format(module)({"a": 1})
    with pytest.raises(UserError, match=r"leaves: it failed on prediction 'a' \(.*SystemExit\(0\)"):
        Scores.named([module]).of_row("a", ["b"], None, ())
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(UserError, match=r"format=.*ends.py:f: it can't be imported .*SystemExit\(0\)"):
        imported(f"{tmp_path}/ends.py:f", "format")


def test_the_copy_that_a_fork_leaves_in_a_function_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    child = -1
    with calling("my.py:forks"):
        child = os.fork()
    assert child > 0  # the forked process never comes here
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 70
    assert "zoo: my.py:forks has forked" in capfd.readouterr().err


CALL = """
import os, signal, sys
from pathlib import Path
from zoo import user_code
from zoo.parallel.processes import CALLED_SUFFIX, FAILURE_LOG
user_code.record(Path(os.environ[FAILURE_LOG]).with_suffix(CALLED_SUFFIX))
with user_code.calling("my.py:Hooks: on_step"):
    if os.environ["RANK"] == "1":
        {ends}
{then}
user_code.forget()
"""


@pytest.mark.parametrize(
    ("ends", "then", "code", "said"),
    [
        ("os._exit(0)", "import time; time.sleep(1)", 1, "rank 1 was ended in the middle of its work with exit code 0, while it called my.py:Hooks: on_step"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", 137, ", while it called my.py:Hooks: on_step"),
        ("pass", "os._exit(0)", 1, "exit code 0, as by os._exit or exit() in a thread or library"),
        ("pass", "", 0, ""),
    ],
)  # fmt: skip
def test_a_rank_that_a_function_ends_has_failed(
    ends: str, then: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", CALL.format(ends=ends, then=then)]
    messages: list[str] = []
    assert run_ranks(command, 2, threads=1, messages=messages) == code
    assert said in "\n".join(messages)


def test_a_busy_loop_in_a_function_is_no_progress() -> None:
    """Its lines change, so a thread of zoo's own that did the same would count as working."""
    progress, stop = Progress(), threading.Event()

    def spin() -> None:
        progress._thread = threading.get_ident()
        number = 0
        while not stop.is_set():
            number += 1
            number -= 1

    thread = threading.Thread(target=spin, daemon=True)
    with calling("format=my.py:spins"):
        thread.start()
        moments = [progress.moment() for _ in range(200)]
        stop.set()
    assert len({moment.progress for moment in moments[1:]}) == 1
    assert moments[-1].source_line.endswith("(calling format=my.py:spins)")
    assert user_code.called() == ""


THREAD = """
import threading, time
from zoo.parallel import processes
processes._THREAD_SECONDS, processes._MOST_THREAD_SECONDS = 0.1, 0.2
threading.Thread(target=time.sleep, args=({seconds},), name="uploader").start()
processes.end_with(0)
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.05, 0), (60, 1)])
def test_threads_that_do_not_end_are_named_and_left(seconds: float, code: int) -> None:
    command = [sys.executable, "-c", THREAD.format(seconds=seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    if code:
        assert "waiting for threads" in done.stderr and "(uploader) do not end" in done.stderr
