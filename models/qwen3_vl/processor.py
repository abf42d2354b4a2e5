"""Qwen3-VL's processor: images, and videos as frames behind timestamps."""

from __future__ import annotations

from zoo.data.processors.timestamped import TimestampedProcessor

build_processor = TimestampedProcessor.build
