"""GPU tests: skipped without a GPU, unless `--on-cpu` is given, which tries the tests themselves (in fp32 and bf16 on the CPU)."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.on_gpu import ON_GPU

# transformers' own delta rule and convolution are the reference: it looks for kernels when its models are imported.
KERNELS = ("fla", "causal_conv1d")
modules: dict[str, Any] = sys.modules
hidden = {name: modules.pop(name) for name in KERNELS if name in modules}
modules.update(dict.fromkeys(KERNELS))  # None: importing it fails
for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
    name = f"transformers.models.{family}.modeling_{family}"
    assert name not in modules or not torch.cuda.is_available(), "tests/gpu wants a run of its own: imported too early"
    importlib.import_module(name)
for name in KERNELS:
    del modules[name]
modules.update(hidden)

torch.backends.cudnn.allow_tf32 = False  # fp32 references are of fp32


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="run the GPU tests on the CPU, to try them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_GPU or config.getoption("--on-cpu", default=False):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def reports(request: pytest.FixtureRequest) -> Any:
    """What tests measured, printed at the end."""
    lines: list[str] = []
    yield lines
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))
