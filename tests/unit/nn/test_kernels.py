"""The fused kernels compute what plain PyTorch does; tests/gpu holds them to it in half precision on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import FAMILIES

from zoo.nn.decoder.attention.delta_rule_settings import SETTINGS, _use
from zoo.nn.kernels import fused

SUPPORT = Path(__file__).parents[2] / "support"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch on Linux alone"
)


def output(script: str, *arguments: str, **environment: str) -> Any:
    """What a script of tests/support prints as JSON."""
    done = subprocess.run(
        [sys.executable, SUPPORT / script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_triton
def test_interpreted_kernels_equal_plain_pytorch() -> None:
    errors = output("interpret_kernels.py", TRITON_INTERPRET="1")
    assert len(errors) == 85
    assert all(value < 5e-6 for value in errors.values()), errors  # NaN is not


def test_they_leave_the_cpu_and_fp32_alone() -> None:
    assert not fused(torch.zeros(2, dtype=torch.bfloat16))
    assert not fused(torch.zeros(2))


def test_settings_name_kernels_of_one_library() -> None:
    assert all(name.startswith("fla.") and values for kernels in SETTINGS.values() for name, values in kernels.items())


@needs_triton
@pytest.mark.parametrize("hooked", [False, True])
def test_a_kernel_with_a_setting_is_launched_without_its_tuner(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    calls: list[tuple[Any, ...]] = []

    class Kernel:
        def run(self, *args: Any, **options: Any) -> str:
            calls.append((args, options))
            return "launched"

    hook = (lambda _: None) if hooked else None
    configs = [triton.Config({"BT": size}, num_warps=4, num_stages=3, pre_hook=hook) for size in (8, 16)]
    tuner = SimpleNamespace(configs=configs, fn=Kernel(), run=lambda **_: "tuned")
    module = SimpleNamespace(kernel=SimpleNamespace(fn=tuner))  # heuristics around the tuner
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.kernels", module)
    assert _use("fla.kernels", "kernel", {"BT": 16, "num_warps": 4})
    assert tuner.configs == configs[1:]
    assert tuner.run(1, grid=(2,)) == "launched" if not hooked else tuner.run(grid=(2,)) == "tuned"
    if not hooked:
        assert calls == [((1,), {"grid": (2,), "BT": 16, "num_warps": 4, "num_ctas": 1, "num_stages": 3})]
    assert not _use("fla.kernels", "kernel", {"BT": 8}) and not _use("fla.kernels", "other", {})


KERNELS = {
    "qwen35_vl": "conv gate gelu launch layer_norm loss norm rotary swiglu",
    "qwen25_omni": "launch layer_norm linears loss norm rotary swiglu",
    "glm45v": "launch layer_norm linears loss norm rotary swiglu",
}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_interpreted_kernels_equals_one_of_plain_pytorch(family: str, tmp_path: Path) -> None:
    """Where each kernel stands in a model, with what goes past it and back: one training step."""
    found = output("interpret_model.py", str(tmp_path), family, TRITON_INTERPRET="1")
    assert found["loss"] < 1e-6 and found["gradient"] < 5e-6, found
    ran = {name.partition(".")[0] for name in found["kernels"]}
    assert ran == set(KERNELS[family].split()) if family in KERNELS else ran, found


@pytest.mark.slow
@needs_triton
def test_they_compile_for_a_gpu_without_running_out_of_registers() -> None:
    found = output("compile_kernels.py")
    failed = {name: why for name, why in found.items() if isinstance(why, str)}
    assert not failed, failed
    assert len(found) > 30
    assert not any(found.values()), {name: spilled for name, spilled in found.items() if spilled}


@pytest.mark.slow
@needs_triton
def test_updates_in_one_kernel_are_those_of_plain_pytorch() -> None:
    """Clipped or not, some steps left out; a value next to the edge of two is rounded the other way now and then."""
    printed = output("interpret_updates.py", TRITON_INTERPRET="1")
    assert printed.pop("read"), "moments in 8 bits, for a save"
    for name, found in printed.items():
        bound = 1e-6 if name.endswith("torch.float32 and torch.float32") else 5e-2
        for share, most in (found["masters"], found["moments"], found["weights"]):
            assert share < 1e-3 and most < bound, (name, found)
        assert found["updates"] == [3, 3], (name, found)
