"""The table of GPUs: names, memory, kernels, and what was measured on them."""

import json
from pathlib import Path

import pytest

import zoo
from zoo.config.compose import load_recipe
from zoo.config.gpus import GPUS, find_gpu, gpu_of_device, near_gpus
from zoo.config.validate import validate
from zoo.errors import ConfigError

BENCHMARKS = Path(zoo.__file__).parents[1] / "benchmarks/results"


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
    found = set()
    for path in BENCHMARKS.glob("*.json"):
        for device in json.loads(path.read_text())["environment"]["gpus"]:
            gpu = gpu_of_device(device)
            found.add(gpu.name if gpu else device)
    assert found == {name for name, gpu in GPUS.items() if gpu.measured}


def test_a_machine_of_a_gpu_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"^machine\.gpu=h20o: no such GPU; nearest: h20, h200"):
        validate(load_recipe("qwen3_vl_sft", ["hardware=cpu", "machine.gpu=h20o"]), 1)


def test_typos_find_their_gpu() -> None:
    for typed, meant in (("h20o", "h200"), ("a1000", "a100"), ("4090", "rtx4090"), ("l4os", "l40s"), ("B20", "b200")):
        assert find_gpu(typed) is None
        assert meant in near_gpus(typed)
