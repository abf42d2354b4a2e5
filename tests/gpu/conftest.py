"""GPU tests: skipped without a GPU, unless `--on-cpu` is given, which tries the tests themselves (in fp32 and bf16 on the CPU)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

# transformers' own delta rule and convolution are the reference, whatever kernels are installed.
for name in ("is_flash_linear_attention_available", "is_causal_conv1d_available"):
    if hasattr(import_utils, name):
        setattr(import_utils, name, lambda: False)

ON_GPU = torch.cuda.is_available()
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
