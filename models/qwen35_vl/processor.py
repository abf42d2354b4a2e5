"""Qwen3.5-VL's processor: images, and videos as frames behind timestamps."""

from __future__ import annotations

from typing import Any

from zoo.data.timestamped import TimestampedProcessor


def build_processor(arch_config: Any, source: str | None = None) -> TimestampedProcessor:
    """The processor of a run: that of `source`, or one around the bundled tokenizer."""
    return TimestampedProcessor.build(arch_config, source)
