"""A processor of each family that takes images, around tiny settings."""

from __future__ import annotations

from typing import Any

from support import tiny_internvl
from support.tiny_gemma3 import tiny_config as tiny_gemma3
from support.tiny_gemma4 import tiny_config as tiny_gemma4
from support.tiny_llava import tiny_config
from zoo.data.processors.processor import Processor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.models.gemma3.processor import build_processor as build_gemma3
from zoo.models.gemma4.processor import build_processor as build_gemma4
from zoo.models.glm45v.processor import build_processor as build_glm45v
from zoo.models.internvl.processor import build_processor as build_internvl
from zoo.models.llava.processor import build_processor as build_llava
from zoo.models.qwen3_omni.processor import build_processor as build_omni
from zoo.models.qwen25_omni.processor import build_processor as build_qwen25_omni
from zoo.models.qwen25_vl.processor import build_processor as build_qwen25

VISION = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
PATCHED = ("timestamped", "omni", "qwen25_omni", "qwen25_vl", "glm45v")  # whose media have limits of pixels
TILED = ("gemma3", "gemma4", "llava", "llava_next", "llava_onevision", "internvl")


def build(name: str, arch: dict[str, Any]) -> Processor:
    """A processor by its name, one of PATCHED and TILED; `arch` is that of Qwen3-Omni."""
    builders = {
        "timestamped": lambda: TimestampedProcessor.build(VISION),
        "omni": lambda: build_omni(arch),
        "qwen25_omni": lambda: build_qwen25_omni({**VISION, "audio_config": {"num_mel_bins": 80}}),
        "qwen25_vl": lambda: build_qwen25(VISION),
        "glm45v": lambda: build_glm45v(VISION),
        "gemma3": lambda: build_gemma3(tiny_gemma3()),
        "gemma4": lambda: build_gemma4(tiny_gemma4()),
        "internvl": lambda: build_internvl(tiny_internvl.tiny_config()),
    }
    return builders[name]() if name in builders else build_llava(tiny_config(name))
