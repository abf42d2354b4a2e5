"""Runs `zoo` commands in forks of one process that has imported everything: seconds less for each command.

Reads one JSON object a line, {"argv", "cwd", "out", "tty", "limits"}; answers {"pid"} when the command has started and {"code"} when
it has ended. stdout goes to the file `out`, stderr to `out` + ".err"; with `tty` both go to a terminal of 100 columns
that is read into `out`; `limits` has values of resource.setrlimit by name.
"""

import fcntl
import json
import os
import pty
import resource
import signal
import struct
import sys
import termios
import traceback
from typing import NoReturn

from zoo.cli.main import main
from zoo.registry import families

COLUMNS = 100


def command(request: dict) -> NoReturn:
    """The child: become a `zoo` process."""
    if not request["tty"]:
        os.setsid()
        os.dup2(os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(request["out"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        code = main(request["argv"])
    except BaseException:
        traceback.print_exc()  # as Python does before it ends a process of its own
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def copy_terminal(master: int, path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the last writer has closed it
                return
            file.write(data)


def serve() -> None:
    import zoo.training.trainer  # noqa: F401  (for the forks)

    for family in families().values():
        for part in ("config", "model", "step", "bridge", "processor"):
            family.load(part)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid, master = pty.fork() if request["tty"] else (os.fork(), -1)
        if pid == 0:
            command(request)
        print(json.dumps({"pid": pid}), flush=True)
        if request["tty"]:
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
            copy_terminal(master, request["out"])
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


if __name__ == "__main__":
    serve()
