"""Qwen3.5-VL's step."""

from __future__ import annotations

from zoo.steps.vision import VisionStep


class Qwen35VLStep(VisionStep):
    """Positions, placeholders and media as `VisionStep` has them; MTP is every step's."""
