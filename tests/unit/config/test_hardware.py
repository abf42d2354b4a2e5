"""`hardware`: GPUs by name and by memory, what is here, and what is planned for it; the table of GPUs."""

import json
from pathlib import Path

import pytest
from support.recipes import NAME, error_of, write

import zoo
from zoo.config import compose, files
from zoo.config.compose import load_recipe
from zoo.config.gpus import GPUS, find_gpu, gpu_of_device, near_gpus
from zoo.config.validate import validate
from zoo.errors import ConfigError

BENCHMARKS = Path(zoo.__file__).parents[1] / "benchmarks/results"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)


def test_hardware_is_a_number_of_a_kind() -> None:
    recipe = load_recipe(NAME, ["size=30b-a3b", "hardware=2x8xh200"])
    assert (recipe.machine.nodes, recipe.machine.gpus, recipe.machine.memory_gb) == (2, 8, 141)
    assert recipe.hardware == "2x8xh200"
    assert recipe.engine.precision == "bf16"
    assert load_recipe(NAME, ["hardware=4xh100"]).machine.gpus == 4
    near = error_of("hardware=8xh210")
    assert near.startswith("hardware=8xh210: no such hardware; nearest: 8x") and "8xh200" in near
    assert error_of("hardware=0xh100") == "hardware=0xh100: wanted at least one of them"
    assert error_of("hardware=2xcpu") == "hardware=2xcpu: cpu is no GPU to have several of; write hardware=cpu"


@pytest.mark.parametrize(
    ("hardware", "gpu", "memory"),
    [
        ("8xa100", "a100", 80), ("4xa100-40", "a100-40", 40), ("8xb200", "b200", 180), ("4xl40s", "l40s", 48),
        ("2xrtx4090", "rtx4090", 24), ("8x80gb", "80gb", 80), ("H100", "h100", 80), ("2x8xH100-80GB", "h100", 80),
    ],
)  # fmt: skip
def test_any_gpu_by_name_or_by_memory(hardware: str, gpu: str, memory: float) -> None:
    recipe = load_recipe(NAME, [f"hardware={hardware}"])
    assert (recipe.machine.gpu, recipe.machine.memory_gb) == (gpu, memory)
    assert recipe.engine.precision == "bf16" and recipe.parallel.plan


def test_a_gpu_that_there_is_not() -> None:
    assert "nearest: 4xrtx4090" in error_of("hardware=4x4090")
    assert "any other GPU by its memory: 8x80gb" in error_of("hardware=8xtpu5")
    assert error_of("hardware=8x0gb").startswith("hardware=8x0gb: no such hardware")
    assert "h200" in error_of("hardware=h20o")


def test_what_is_given_is_not_planned(tmp_path: Path) -> None:
    every = ["tp", "pp", "cp", "ep", "recompute", "memory", "offload", "graphs", "batch"]
    assert load_recipe(NAME, ["hardware=8xh100"]).parallel.plan == every
    given = ["hardware=8xh100", "parallel.tp=2", "train.global_batch=4", "engine.recompute=full"]
    assert load_recipe(NAME, given).parallel.plan == ["pp", "cp", "ep", "memory", "offload", "graphs"]
    given = ["hardware=8xh100", "parallel.pp=2", "parallel.stage_layers=[1,3]", "train.exp_avg_sq_dtype=bf16"]
    assert load_recipe(NAME, given).parallel.plan == ["tp", "cp", "ep", "recompute", "offload", "graphs", "batch"]
    assert load_recipe(NAME, ["hardware=8xh100", "parallel.plan=[]"]).parallel.plan == []
    mine = write(tmp_path / "mine.yaml", f"base: {NAME}\nparallel: {{pp: 2}}\n")
    assert "pp" not in load_recipe(mine, ["hardware=8xh100"]).parallel.plan


def test_hardware_auto_is_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_recipe(NAME, ["hardware=auto"]).engine.precision == "fp32"
    assert load_recipe(NAME).machine.gpus is None
    monkeypatch.setattr(compose, "gpu_count", lambda: 4)
    monkeypatch.setattr(files, "gpu_count", lambda: 4)
    for size, memory in ((150_754_000_000, 150.8), (85_520_000_000, 85.5), (25_000_000_000, 25.0)):
        monkeypatch.setattr(files, "gpu_memory", lambda size=size: size)
        recipe = load_recipe(NAME)
        assert (recipe.hardware, recipe.machine.gpus, recipe.machine.memory_gb) == ("auto", 4, memory)
        assert recipe.parallel.plan and recipe.machine.gpu is None
    monkeypatch.setattr(files, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    assert load_recipe(NAME).machine.gpu == "h100"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert load_recipe(NAME).machine.nodes == 4


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", None),
    ],
)
def test_the_name_that_a_driver_gives(device: str, name: str | None) -> None:
    found = gpu_of_device(device)
    assert (found.name if found else None) == name


def test_kernels_follow_compute_capability() -> None:
    kernels = {name: (gpu.attention, gpu.fp8) for name, gpu in GPUS.items()}
    assert kernels["h200"] == ("FlashAttention 4", True)
    assert kernels["a100"] == ("FlashAttention 2", False)
    assert kernels["l40s"] == ("FlashAttention 2", True)
    unknown = find_gpu("80gb")
    assert unknown is not None and (unknown.attention, unknown.fp8, unknown.tflops) == (None, None, None)
    assert "nothing measured" in unknown.about()


def test_what_was_measured_is_in_the_benchmarks() -> None:
    """Each GPU of benchmarks/results says so, and no other."""
    environments = [json.loads(path.read_text())["environment"] for path in BENCHMARKS.glob("*.json")]
    devices = {device for environment in environments for device in environment["gpus"]}
    assert {getattr(gpu_of_device(device), "name", device) for device in devices} == {
        name for name, gpu in GPUS.items() if gpu.measured
    }


def test_a_machine_of_a_gpu_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"^machine\.gpu=h20o: no such GPU; nearest: h20, h200"):
        validate(load_recipe("qwen3_vl_sft", ["hardware=cpu", "machine.gpu=h20o"]), 1)


def test_typos_find_their_gpu() -> None:
    for typed, meant in (("h20o", "h200"), ("a1000", "a100"), ("4090", "rtx4090"), ("l4os", "l40s"), ("B20", "b200")):
        assert find_gpu(typed) is None
        assert meant in near_gpus(typed)
