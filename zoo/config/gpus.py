"""GPUs by name: memory, peak and the kernels that zoo has for them; `hardware=8xa100`, `hardware=4xa100-40`, `hardware=8x80gb`.

A name is a key of the table, a key with another memory (`a100-40`, `h20-141`, a slice `h100-40`), or a memory alone (`80gb`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zoo.config.layers.keys import nearest

_SIZED = re.compile(r"(\w+)-(\d{1,4})(?:gb)?", re.ASCII)
_MEMORY = re.compile(r"(\d{1,4})gb?", re.ASCII)
_OLDEST = (8, 0)  # compute capability of Ampere: below it there is no bf16
_FP8 = (8, 9)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; None where a memory alone was given."""

    name: str
    memory_gb: float  # as its maker states it, in units of 10^9 bytes; the driver shows 2 to 7 % more
    tflops: float | None = None  # dense bf16 with sums in fp32, as its maker states it, without sparsity
    capability: tuple[int, int] | None = None
    device: str = ""  # what the driver's name of it holds, apart from the memory
    measured: str = ""  # what docs/benchmarks.md has of it

    @property
    def attention(self) -> str | None:
        """The kernel of packed attention that zoo runs on it; None where that is not known."""
        if self.capability is None:
            return None
        if self.capability[0] == 9:
            return "FlashAttention 4"
        return "FlashAttention 2" if self.capability >= _OLDEST else "none"

    @property
    def fp8(self) -> bool | None:
        """Whether it multiplies in FP8; None where that is not known."""
        return None if self.capability is None else self.capability >= _FP8

    def about(self) -> str:
        """One line: memory, peak, kernels and what was measured."""
        parts = [f"{self.memory_gb:g} GB"]
        if self.tflops:
            parts.append(f"{self.tflops:g} TFLOP/s in bf16")
        if self.capability:
            parts.append(f"{self.attention}, {'FP8' if self.fp8 else 'no FP8'}")
        parts.append(f"measured: {self.measured}" if self.measured else "nothing measured")
        return ", ".join(parts)


_TABLE = {
    # name: GB, TFLOP/s, compute capability, driver's name
    "b300": (270, 2250, (10, 3), "B300"), "gb300": (279, 2500, (10, 3), "GB300"),
    "b200": (180, 2250, (10, 0), "B200"), "gb200": (186, 2500, (10, 0), "GB200"),
    "h200": (141, 989.5, (9, 0), "H200"), "h200nvl": (141, 835, (9, 0), "H200 NVL"),
    "gh200": (96, 989.5, (9, 0), "GH200"), "h100": (80, 989.5, (9, 0), "H100"),
    "h100nvl": (94, 835, (9, 0), "H100 NVL"), "h100pcie": (80, 756, (9, 0), "H100 PCIe"),
    "h800": (80, 989.5, (9, 0), "H800"), "h20": (96, 148, (9, 0), "H20"),
    "a100": (80, 312, (8, 0), "A100"), "a800": (80, 312, (8, 0), "A800"), "a30": (24, 165, (8, 0), "A30"),
    "a40": (48, 149.7, (8, 6), "A40"), "a10": (24, 125, (8, 6), "A10"), "a10g": (24, 70, (8, 6), "A10G"),
    "rtxa6000": (48, 154.8, (8, 6), "RTX A6000"), "rtx3090": (24, 71, (8, 6), "RTX 3090"),
    "l40s": (48, 362, (8, 9), "L40S"), "l40": (48, 181, (8, 9), "L40"), "l4": (24, 121, (8, 9), "L4"),
    "rtx6000ada": (48, 364.2, (8, 9), "RTX 6000 Ada"), "rtx4090": (24, 165.2, (8, 9), "RTX 4090"),
    "rtx4080": (16, 97.5, (8, 9), "RTX 4080"), "rtx5090": (32, 209.5, (12, 0), "RTX 5090"),
    "rtxpro6000": (96, 503.8, (12, 0), "RTX PRO 6000"),
}  # fmt: skip
_MEASURED = {"h200": "Qwen3.5-VL 2B, Qwen3-VL 4B and layers of 30B-A3B on 1 to 4"}

GPUS = {name: Gpu(name, *values, _MEASURED.get(name, "")) for name, values in _TABLE.items()}


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name or memory: h100, a100-40, 80gb; None for anything else."""
    name = name.lower()
    if name in GPUS:
        return GPUS[name]
    if (memory := _MEMORY.fullmatch(name)) and int(memory[1]):
        return Gpu(f"{int(memory[1])}gb", float(memory[1]))
    sized = _SIZED.fullmatch(name)
    if sized and sized[1] in GPUS and int(sized[2]):
        gpu = GPUS[sized[1]]
        other = float(sized[2]) != gpu.memory_gb
        return replace(gpu, name=name, memory_gb=float(sized[2])) if other else gpu
    return None


def near_gpus(name: str) -> list[str]:
    """Names of GPUs that were perhaps meant."""
    return nearest(name.lower().replace(" ", ""), list(GPUS))


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU that the driver calls so, "NVIDIA A100-SXM4-40GB"; None where the table lacks it."""
    fitting = [gpu for gpu in GPUS.values() if re.search(rf"\b{re.escape(gpu.device)}\b", device)]
    return max(fitting, key=lambda gpu: len(gpu.device), default=None)
