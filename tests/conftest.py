"""What every test shares: no network, quiet threads, and GPU tests only where there is a GPU."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing a test needs lies on the hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
