"""What every test shares: no network, quiet threads, and GPU tests only where there is a GPU."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the package `support`

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing a test needs lies on the hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers run side by side, and tiny tensors gain nothing

from support import deadline


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """SIGHUP and SIGINT are not ignored in the test, as under nohup and in the background of a script; its processes inherit that."""
    numbers = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


_cases: Counter[tuple[str, Any]] = Counter()  # cases of each function, and family of support.families, so far


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark cases of tests marked `sampled(n)` as slow, but for each n-th of a family, which stays in the fast tier."""
    sampled = item.get_closest_marker("sampled")
    if sampled:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        function = item.nodeid.partition("[")[0], params.get("family")
        if _cases[function] % sampled.args[0]:
            item.add_marker(pytest.mark.slow)
        _cases[function] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    deadline.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline.leave_out_when_late(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    deadline.list_left_out(terminalreporter)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests that share a world come last in their file: it lasts up to its end, and others start worlds of their own.
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], "cpu_world" in getattr(item, "fixturenames", ())))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def cpu_world() -> Iterator[Any]:
    """zoo's World of one rank under gloo, up to the end of the file. A test that starts its own must not ask for it."""
    from support.engine import single_process_world

    with single_process_world() as world:
        yield world


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of one tiny random Qwen3-Omni as transformers saves it (support.tiny_omni.TinyOmni)."""
    from support.tiny_omni import write_tiny_omni

    return write_tiny_omni(tmp_path_factory.mktemp("tiny_omni"))
