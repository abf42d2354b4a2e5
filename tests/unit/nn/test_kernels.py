"""The fused kernels compute what plain PyTorch does; tests/gpu holds them to it in half precision on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.nn.kernels import fused
from zoo.nn.tuned import SETTINGS

SCRIPT = Path(__file__).parents[2] / "support" / "interpret_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for this machine")
def test_interpreted_kernels_equal_plain_pytorch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 49
    assert max(errors.values()) < 5e-6, errors


def test_they_leave_the_cpu_and_fp32_alone() -> None:
    assert not fused(torch.zeros(2, dtype=torch.bfloat16))
    assert not fused(torch.zeros(2))


def test_settings_name_kernels_of_one_library() -> None:
    assert all(
        name.startswith("fla.") and values
        for kernels in SETTINGS.values()
        for name, values in kernels.items()
    )
