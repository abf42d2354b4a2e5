"""A server's process, which ends soon after the one that asked for it: python -m zoo.tools.serving.guard COMMAND...

Standard input is a pipe whose other end the asking process holds. It closes with that process, however that ends. This one leads a
process group, which all processes of the server belong to.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 20.0  # that a server may use to end by itself


def main(command: Sequence[str]) -> int:
    """Run the command until it ends, or until standard input closes; its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the group, they are for the server
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            break
    code = process.poll()
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + (_GRACE_SECONDS if code is None else 0)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if code is None:  # it was stopped: nothing of it stays
        os.killpg(0, signal.SIGKILL)
    return code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
