"""How a rank's process ends."""

import subprocess
import sys

import pytest

TEXT = """
import atexit, sys, threading, time
import torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from zoo.parallel.processes import end_with

store = dist.HashStore()
store.set("a", "b")

def ask():
    while True:
        store.get("a")  # without Python's lock, and takes it again within C++

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
atexit.register(print, "exit function")
ThreadPoolExecutor(1).submit(lambda: time.sleep(0.2) or print("thread"))
"""


@pytest.mark.slow
def test_threads_of_libraries_do_not_abort_the_end() -> None:
    """Behind `sys.exit(3)` this process aborts."""
    text = f"{TEXT}end_with(3)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3 and done.stdout.splitlines() == ["thread", "exit function"], done.stderr
